"""Tiny runs of the staleness sweep, recomputed from the run folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.studies import staleness_sweep
from persia_sim.base.command_line import read_options
from persia_sim.base.vocabulary import Mode
from runtime.config import DataConfig, ModelConfig, SyncConfig
from runtime.data.batch import Batch
from tests.experiments.raw_runs import check_gap_table, close, printed_by, raw_runs, read_csv
from tests.runtime.clicks_of_a_user import write_clicks

pytestmark = [pytest.mark.multiproc, pytest.mark.long]  # its runs are made once, for all tests
STEPS = 8


def tiny(out: Path) -> staleness_sweep.Options:
    return staleness_sweep.Options(
        modes=(Mode.SYNC, Mode.HYBRID, Mode.ASYNC),
        taus=(0, 3),
        seeds=2,
        ranks=2,
        steps=STEPS,
        factor=("rows.optimizer.lr=0.05,0.2",),
        evaluate_every_steps=4,
        data=DataConfig(name="synthetic"),
        model=ModelConfig(hidden=(8,)),
        test_rows=600,
        out=out,
        jobs=2,
    )


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("staleness-sweep")
    staleness_sweep.run(tiny(out))
    return out


def by_row_lr(root: Path) -> dict[str, dict]:
    """The run folders, apart by the factor, which their config.json holds."""
    return {
        f"rows.optimizer.lr={lr}": raw_runs(
            root, only=lambda config, lr=lr: config["rows"]["optimizer"]["lr"] == lr
        )
        for lr in (0.05, 0.2)
    }


@pytest.mark.long
def test_every_figure_of_the_sweep_follows_from_the_predictions(sweep):
    rows = read_csv(sweep / "staleness_sweep.csv")
    parts = by_row_lr(sweep)
    assert (
        set(parts)
        == {"rows.optimizer.lr=0.05", "rows.optimizer.lr=0.2"}
        == {r["factors"] for r in rows}
    )
    for label, runs in parts.items():
        own = [r for r in rows if r["factors"] == label]
        assert [(r["mode"], r["tau"]) for r in own] == [
            ("sync", "0"), ("hybrid", "0"), ("hybrid", "3"), ("async", "0"), ("async", "3"),
        ]  # fmt: skip
        check_gap_table(own, runs)
        assert [(r["rows_late"], r["dense_late"]) for r in own[2:]] == [
            ("3", "0"), ("1", "1"), ("7", "1"),
        ]  # fmt: skip
        assert float(own[1]["gap_to_sync"]) == 0.0, "merged, so tau = 0 is sync in its bytes"


def test_rows_that_are_late_by_much_of_a_run_are_told(sweep, capsys):
    staleness_sweep.run(tiny(sweep))  # all of it is done: read again
    told = "rows 1, 3, 7 updates late miss 12, 38, 88 % of the run's 8 updates."
    assert capsys.readouterr().out.count(told) == 2, "once for each factor"


@pytest.mark.parametrize("chance", [0.0, 1.0], ids=["above chance", "at chance"])
def test_each_mode_has_its_best_factors_and_none_that_are_at_chance(
    chance, sweep, monkeypatch, capsys
):
    monkeypatch.setattr(staleness_sweep, "CHANCE_AUC", chance)
    staleness_sweep.run(tiny(sweep))
    lines = read_csv(sweep / "staleness_sweep_best.csv")
    means: dict[tuple[str, str], dict[str, float]] = {}
    for label, runs in by_row_lr(sweep).items():
        for mode, tau, _ in runs:
            both = [runs[mode, tau, seed].auc() for seed in (0, 1)]
            means.setdefault((mode, tau), {})[label] = sum(both) / 2
    of_sync = max(means["sync", "0"].values())
    assert sorted((line["mode"], line["tau"]) for line in lines) == sorted(means)
    for line in lines:
        aucs = means[line["mode"], line["tau"]]
        best = max(aucs, key=lambda label: aucs[label])
        assert line["factors"] == ("none above chance" if chance else best)
        assert float(line["auc"]) == pytest.approx(aucs[best])
        assert float(line["gap_to_sync"]) == pytest.approx(aucs[best] - of_sync, abs=1e-9)
    assert "they were chosen on the test part" in capsys.readouterr().out


def test_the_sweeps_curves_have_every_line_of_the_metrics_once(sweep):
    lines = read_csv(sweep / "staleness_sweep_curves.csv")
    keys = [
        (r["factors"], r["mode"], r["tau"], r["seed"], r["samples"], r["drained"]) for r in lines
    ]
    assert len(keys) == len(set(keys))
    for label, runs in by_row_lr(sweep).items():
        for (mode, tau, seed), run in runs.items():
            own = [r for r in lines if (r["factors"], r["mode"], r["tau"]) == (label, mode, tau)]
            own = [r for r in own if int(r["seed"]) == seed]
            assert [float(r["auc"]) for r in own] == [
                line["tasks"]["click"]["auc"] for line in run.lines()
            ]
            close(own[-1]["auc"], run.auc())


def test_treatments_reach_the_modes_that_have_them_and_leave_sync_the_reference():
    options = staleness_sweep.Options(
        modes=(Mode.SYNC, Mode.HYBRID, Mode.ASYNC), taus=(2,), seeds=1, steps=3,
        factor=("sync.sync_steps=5", "sync.dense_lag=0,1", "sync.delay_compensation=8",
                "sync.lr_by_staleness=True"),
        data=DataConfig(name="synthetic"),
    )  # fmt: skip
    groups = staleness_sweep.plan(options)
    assert [label for label, _ in groups] == ["sync.dense_lag=0", "sync.dense_lag=1"]
    for lag, (_, points) in enumerate(groups):
        sync, hybrid, late = [p.config.sync for p in points]
        assert sync == SyncConfig(ranks=8)
        assert (hybrid.sync_steps, hybrid.dense_lag) == (5, lag)
        assert (late.sync_steps, late.dense_lag) == (0, 0)
        for treated in (hybrid, late):
            assert (treated.delay_compensation, treated.lr_by_staleness) == (8.0, True)


def test_a_mode_or_bound_given_twice_is_no_second_run_of_its_seeds():
    options = staleness_sweep.Options(
        modes=(Mode.SYNC, Mode.HYBRID, Mode.SYNC), taus=(4, 4), seeds=2,
        data=DataConfig(name="synthetic"),
    )  # fmt: skip
    ((_, points),) = staleness_sweep.plan(options)
    assert [p.label for p in points] == [
        "sync-seed0", "hybrid-tau4-seed0", "sync-seed1", "hybrid-tau4-seed1",
    ]  # fmt: skip


def test_crossed_factors_reach_the_configs_of_the_modes_that_have_them():
    options = staleness_sweep.Options(
        modes=(Mode.SYNC, Mode.HYBRID, Mode.ASYNC),
        taus=(1,),
        seeds=1,
        steps=3,
        factor=(
            "batch=16,32",
            "rows.optimizer.kind=adagrad",
            "rows.optimizer.initial_accumulator=0.25",
            "rows.initial_scale=0.125",
            "model.optimizer=sgd",
            "model.lr=0.5",
            "sync.merge_pushes=False",
            "sync.match=global",
        ),
        data=DataConfig(name="synthetic"),
    )
    groups = staleness_sweep.plan(options)
    assert [label for label, _ in groups] == ["batch=16", "batch=32"]
    for batch, (_, points) in zip((16, 32), groups, strict=True):
        sync, hybrid, late = [p.config for p in points]
        assert [p.label for p in points] == ["sync-seed0", "hybrid-tau1-seed0", "async-tau1-seed0"]
        for config in (sync, hybrid, late):
            assert (config.batch, config.steps, config.sync.ranks) == (batch, 3, 8)
            row = config.rows.optimizer
            assert (row.kind, row.initial_accumulator) == ("adagrad", 0.25)
            assert config.rows.initial_scale == 0.125
            assert (config.model.optimizer, config.model.lr) == ("sgd", 0.5)
        assert [c.sync.merges for c in (sync, hybrid, late)] == [True, False, False]
        assert late.batch_per_push == batch // 8 and hybrid.batch_per_push == batch


RUN = """batch = 64
[sync]
mode = "hybrid"
dense_lag = 2
[model]
hidden = [16]
[model.schedule]
warmup_steps = 5
[tables.rows]
dim = 4
[evaluation]
test_rows = 128
"""


def test_a_file_says_what_is_not_typed(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    words = ["--config", str(tmp_path / "run.toml"), "--data", "synthetic", "--seeds", "1"]
    words += ["--taus", "1", "--steps", "3", "--batch", "32"]
    options = read_options(staleness_sweep.Options, words, "staleness-sweep")
    ((label, points),) = staleness_sweep.plan(options)
    assert [p.label for p in points] == ["sync-seed0", "hybrid-tau1-seed0", "async-tau1-seed0"]
    assert label == ""
    for config in (p.config for p in points):
        assert (config.batch, config.steps, config.sync.ranks) == (32, 3, 8)
        assert (config.model.hidden, config.model.schedule.warmup_steps) == ((16,), 5)
        assert (config.tables, config.evaluation.test_rows) == ({"rows": {"dim": 4}}, 128)
    assert [p.config.sync.dense_lag for p in points] == [0, 2, 0]  # none in sync, async has its own


def test_a_preset_is_compared_with_sync():
    words = ["--preset", "torchrec-semisync-stash", "--data", "synthetic", "--seeds", "1"]
    options = read_options(staleness_sweep.Options, words, "staleness-sweep")
    ((_, points),) = staleness_sweep.plan(options)
    assert [p.label for p in points] == ["sync-seed0", "hybrid-tau1-seed0"]
    asked = points[1].config.sync
    assert (asked.sync_steps, asked.dense_lag) == (900, 1)
    assert points[0].config.sync == SyncConfig(ranks=8)


def test_what_no_mode_of_the_sweep_reads_is_refused_in_a_file_too(tmp_path):
    (tmp_path / "run.toml").write_text('[sync]\nmode = "lookahead"\nahead = 7\n')
    words = ["--config", str(tmp_path / "run.toml"), "--data", "synthetic"]
    with pytest.raises(ValueError, match="ahead"):
        read_options(staleness_sweep.Options, words, "staleness-sweep")


def test_a_regression_which_has_no_auc_is_refused_before_the_first_point(tmp_path, capsys):
    schema = write_clicks(tmp_path)
    schema.write_text(f'regression = ["label"]\n{schema.read_text()}')
    words = ["staleness-sweep", "--data", str(schema), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert "studies compare AUC, and label, the first task of" in capsys.readouterr().err


def test_a_plan_says_minutes(tmp_path, capsys):
    words = "staleness-sweep --data synthetic --modes sync --seeds 1 --steps 40 --model.hidden 8"
    words += f" --test-rows 128 --jobs 1 --out {tmp_path}"
    assert main([*words.split(), "--dry-run"]) == 0
    assert (
        "s of training, as 30 steps of the first point did, and of starting"
        in capsys.readouterr().out
    )
    assert not list(tmp_path.glob("sync*"))
    assert main(words.split()) == 0
    assert main([*words.split(), "--dry-run"]) == 0
    assert "nothing is left to run" in capsys.readouterr().out


def test_each_window_is_judged_after_training_on_all_rows_before_it(tmp_path, monkeypatch):
    """Of 1,500 training samples in time order the second half are three windows of 250."""
    from runtime.data.open import open_source
    from tests.experiments.clicks import clicks_file

    clicks_file(tmp_path, 2000)
    monkeypatch.setenv("PERSIA_DATA_DIR", str(tmp_path))
    given = {
        "modes": (Mode.SYNC, Mode.HYBRID), "taus": (2,), "seeds": 1, "windows": 3, "steps": 2,
        "data": DataConfig(name="kuairand-pure-14d"), "model": ModelConfig(hidden=(4,)),
        "batch": 16, "out": tmp_path / "out", "jobs": 2,
    }  # fmt: skip
    groups = staleness_sweep.plan(staleness_sweep.Options(**given))
    assert [label for label, _ in groups] == ["window=1", "window=2", "window=3"]
    whole = open_source("kuairand-pure-14d", keep=True)
    trained = Batch.concat(list(whole.chunks("train")))
    assert trained.size == 1500
    for number, (_, points) in enumerate(groups):
        data = points[0].config.data
        assert {p.config.data for p in points} == {data}
        assert {p.config.evaluation.eval_split for p in points} == {"validation"}
        source = open_source(
            data.name, rows=data.rows, validation_fraction=data.validation_fraction, keep=True
        )
        before, window = (
            Batch.concat(list(source.chunks(part))).ids.tolist() for part in ("train", "validation")
        )
        first = 750 + 250 * number
        assert before == trained.rows(0, first).ids.tolist()
        assert window == trained.rows(first, first + 250).ids.tolist()
    told = printed_by(staleness_sweep.run, staleness_sweep.Options(**given))
    assert "  validation AUC  " in told and "test AUC" not in told
    rows = read_csv(tmp_path / "out" / "staleness_sweep.csv")
    (_, line, *_) = read_csv(tmp_path / "out" / "staleness_sweep_windows.csv")
    gaps = [
        float(r["gap_to_sync"]) for r in rows if (r["mode"], r["task"]) == ("hybrid", line["task"])
    ]
    assert [float(line[f"gap_{n}"]) for n in (1, 2, 3)] == gaps
    close(line["gap_to_sync"], sum(gaps) / 3)
    spread = (sum((gap - sum(gaps) / 3) ** 2 for gap in gaps) / 2) ** 0.5
    close(line["gap_to_sync_half_width_95"], 4.30265 * spread / 3**0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"data": DataConfig(name="synthetic")}, "windows are of rows in an order"),
        ({"eval_split": "validation"}, "remove --eval-split"),
        ({"factor": ("data.rows=9",)}, "factors of data"),
    ],
)
def test_windows_that_cannot_be_are_refused(more, said):
    given = {"data": DataConfig(name="adult"), "windows": 5, **more}
    with pytest.raises(ValueError, match=said):
        staleness_sweep.Options(**given)


def test_an_unknown_factor_names_some_of_the_options_not_all():
    with pytest.raises(ValueError, match=r"known: sync.permits, .*, and \d+ more") as told:
        staleness_sweep.factors_of(["foo"])
    assert len(str(told.value)) < 1000
