"""Run folders as a registry: what is listed, how two compare, a page about one; none of it trains
but for one tiny run."""

from __future__ import annotations

import base64
import html
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from experiments.registry.compare import comparison, settings_of
from experiments.registry.report import line_chart, write_page
from experiments.registry.runs import RunFolder, listing, read_run, runs_below
from runtime.config import DataConfig, EvaluationConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.run.folder import write_json
from runtime.run.record import run_into
from tests import browser

BASE = TrainConfig(data=DataConfig(name="synthetic"), steps=4, batch=32,
                   evaluation=EvaluationConfig(test_rows=300, evaluate_every_steps=2))  # fmt: skip
LABELS = np.array([0, 1, 0, 1, 1, 0, 1, 0])[:, None]


def made(
    folder: Path, config: TrainConfig = BASE, auc: float | None = 0.7, **files: object
) -> Path:
    """A run folder written by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    about = {
        "commit": "0123456789abcdef", "modified": False, "started": "2026-01-02T03:04:05Z",
        "python": "3.11.0", "cpu": "a cpu", "cores": 2, "packages": {"torch": "1"},
    }  # fmt: skip
    write_json(folder / "env.json", about)
    if auc is not None:
        summary = {
            "mode": str(config.sync.mode), "tau": config.sync.tau, "seed": config.seed,
            "tasks": {"click": {"auc": auc, "log_loss": 0.5}}, "samples": 128,
            "staleness": {"mean_steps": 1.25, "max_steps": 2},
        }  # fmt: skip
        write_json(folder / "summary.json", summary)
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(str(content))
    return folder


def evaluate_twice(run: Path, task: str) -> None:
    lines = (
        {"updates": n, "samples": n, "drained": n == 2, "tasks": {task: {"auc": n / 4}}}
        for n in (1, 2)
    )
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def hybrid(tau: int = 4, seed: int = 0) -> TrainConfig:
    return replace(BASE, sync=SyncConfig(mode="hybrid", tau=tau), seed=seed)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    run_into(folder, hybrid(), typed=["--mode", "hybrid"])
    return folder


def pictures(page: str) -> list[str]:
    """The SVGs of a page."""
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    return [base64.b64decode(one).decode() for one in found]


def line_of(told: str, name: str) -> list[str]:
    return next(re.split(r"  +", x) for x in told.splitlines() if x.startswith(name))


def test_a_run_is_listed_by_what_its_files_say(real):
    summary = json.loads((real / "summary.json").read_text())
    told = line_of(listing(real.parent), "tiny")
    assert told[:7] == ["tiny", "hybrid", "4", "1", "synthetic", "0",
                        f"{summary['tasks']['click']['auc']:.4f}"]  # fmt: skip
    assert told[-1] == "done"


def test_states_are_told_apart_and_a_damaged_run_is_read_as_far_as_it_goes(tmp_path):
    run = read_run(made(tmp_path / "elsewhere" / "torn", hybrid(9), env_json="["))
    assert (run.state, run.mode, run.tau, run.commit) == ("damaged", "hybrid", 9, "-")
    tmp_path /= "runs"
    made(tmp_path / "good")
    made(tmp_path / "went", auc=None)
    made(tmp_path / "broke", auc=None, failed_txt="the disk is full\nmore")
    made(tmp_path / "ended", auc=None, interrupted_json='{"by": "SIGTERM"}')
    made(tmp_path / "torn", summary_json='{"mode": ')
    (tmp_path / "other").mkdir()
    told = listing(tmp_path)
    states = {name: line_of(told, name)[-1] for name in ("good", "went", "broke", "ended", "torn")}
    assert states == {"good": "done", "went": "unfinished", "broke": "failed",
                      "ended": "interrupted", "torn": "damaged"}  # fmt: skip
    assert "5 runs: 1 done" in told and "\nother" not in told
    assert "broke: the disk is full" in told and "torn: " in told
    assert line_of(told, "good")[5:9] == ["0", "0.7000", "2026-01-02 03:04:05", "01234567"]


def test_runs_inside_checkpoints_are_not_listed(tmp_path):
    made(tmp_path / "a")
    made(tmp_path / "a" / "checkpoints" / "b")
    made(tmp_path / "checkpoints" / "c")
    assert [run.folder.name for run in runs_below(tmp_path)] == ["a"]


def test_two_runs_show_the_options_in_which_they_differ(tmp_path):
    a = made(tmp_path / "a", hybrid(4), 0.7)
    b = made(tmp_path / "b", hybrid(16, seed=3), 0.71)
    told = comparison(a, b)
    assert line_of(told, "--tau") == ["--tau", "4", "16"]
    assert line_of(told, "--seed") == ["--seed", "0", "3"]
    assert not re.search(r"^--batch ", told, flags=re.M)
    assert line_of(told, "click AUC") == ["click AUC", "0.7000", "0.7100", "+10.00e-3"]
    assert "no DeLong test: a run keeps no predictions" in told


def test_sweeps_that_share_no_setting_say_what_each_has_and_what_differs(tmp_path):
    for name, batch in (("a", 32), ("b", 64), ("b", 16)):
        changed = replace(BASE, batch=batch)
        made(tmp_path / name / f"sync-{batch}-seed0-0123abcd", changed)
    with pytest.raises(ValueError, match="no setting in common that has ended") as caught:
        comparison(tmp_path / "a", tmp_path / "b")
    told = str(caught.value).splitlines()
    assert told[1].endswith("a has sync")
    assert told[2].endswith("b has sync (batch 64), sync (batch 16)") or "batch 16" in told[2]
    assert told[3] == "  those of one mode and tau differ in batch"


def test_two_runs_say_whether_their_data_and_predictions_are_the_same(real, tmp_path):
    told = comparison(real, real)
    sha256 = json.loads((real / "summary.json").read_text())["data"]["sha256"]
    assert f"the data are the same (sha256 {sha256[:12]})" in told
    assert "every prediction of the two is the same, to the last bit" in told
    other = tmp_path / "other"
    shutil.copytree(real, other)
    text = (other / "summary.json").read_text().replace(sha256, "0" * 64)
    (other / "summary.json").write_text(text)
    assert line_of(comparison(real, other), "sha256")[1:] == [sha256, "0" * 64]


def test_delong_is_told_where_both_were_tested_on_the_same_rows(tmp_path):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (400, 1)).astype(np.int8)
    scores = [labels + rng.normal(0, sd, (400, 1)) for sd in (1.0, 2.0)]
    folders = [made(tmp_path / name) for name in "ab"]
    for folder, own in zip(folders, scores, strict=True):
        np.savez(folder / "predictions.npz", labels=labels, predictions=own)
    told = comparison(*folders)
    a, b = (roc_auc_score(labels[:, 0], own[:, 0]) for own in scores)
    assert f"400 test samples: B - A = {1e3 * (b - a):+.2f}e-3" in told
    rows = [np.repeat(array, 2, axis=0) for array in (labels, *scores)]  # each twice, of one user
    users = np.repeat(np.arange(400), 2)
    for folder, own in zip(folders, rows[1:], strict=True):
        np.savez(folder / "predictions.npz", labels=rows[0], predictions=own, groups=users)
    by_user, error = (
        comparison(*folders),
        r"standard error (\d\d\.\d+)e-3 over test (samples|users)",
    )
    alone, twice = (re.search(error, text) for text in (told, by_user))
    assert (alone[2], twice[2]) == ("samples", "users")
    assert float(twice[1]) == pytest.approx(float(alone[1]), rel=0.01), "not smaller by root two"
    np.savez(folders[1] / "predictions.npz", labels=1 - rows[0], predictions=rows[2])
    assert "not tested on the same samples" in comparison(*folders)


def test_curves_are_compared_at_the_samples_that_both_have(real):
    told = comparison(real, real)
    lines = [json.loads(x) for x in (real / "metrics.jsonl").read_text().splitlines()]
    first = next(x for x in lines if x["samples"] == 64)["tasks"]["click"]["auc"]
    assert line_of(told, "64 ") == ["64", f"{first:.4f}", f"{first:.4f}", "+0.00e-3"]
    assert "every option is the same" in told


def npz(**arrays: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def sweep(root: Path, aucs: dict[int, float], mode: str = "hybrid") -> Path:
    for seed, auc in aucs.items():
        config = hybrid(seed=seed) if mode == "hybrid" else replace(BASE, seed=seed)
        label = f"hybrid-tau4-seed{seed}" if mode == "hybrid" else f"sync-seed{seed}"
        made(root / f"{label}-0123abcd", config, auc)
    return root


def test_two_sweeps_are_paired_by_seed(tmp_path):
    first = sweep(tmp_path / "first", {0: 0.70, 1: 0.72, 2: 0.71})
    second = sweep(tmp_path / "second", {0: 0.71, 2: 0.735, 7: 0.9})
    told = comparison(first, second)
    half = stats.t.ppf(0.975, 1) * np.std([10, 25], ddof=1) / np.sqrt(2)
    assert line_of(told, "hybrid-tau4") == [
        "hybrid-tau4", "2", "0.7050", "0.7225", f"+17.50 ± {half:.2f}"
    ]  # fmt: skip


def test_a_page_of_a_run_has_its_options_scores_and_curve(real, tmp_path):
    path = write_page(real, tmp_path / "page.html")
    text = path.read_text()
    summary = json.loads((real / "summary.json").read_text())
    assert f"{summary['tasks']['click']['auc']:.4f}" in text
    assert "<code>--mode</code>" in text and "persia-runtime train --mode hybrid" in text
    [chart] = pictures(text)
    names = ["training loss", "test AUC", "test log-loss"]
    assert re.findall(r'id="(t\S+ \S+) 0"', chart) == names
    losses = summary["training_loss"]
    assert losses["updates_per_point"] == 1 and len(losses["points"]) == summary["updates"] == 4
    changed, rest = text.split("<details>")
    assert "<code>--mode</code>" not in rest and "<code>--permits</code>" not in changed
    assert "<code>--permits</code>" in rest and "made by this project" in text
    assert f"{summary['samples_per_s']:,.0f} samples/s" in text
    assert not re.search(r'(?:src|href)="(?!data:|#)', text)


def two_models(root: Path, aucs: dict[str, dict[int, float]]) -> Path:
    """Sweeps of two models in one folder, whose labels do not say which is which."""
    for number, (name, found) in enumerate(aucs.items()):
        mode, _, hidden = name.partition(" ")
        for seed, auc in found.items():
            config = hybrid(seed=seed) if mode == "hybrid" else replace(BASE, seed=seed)
            config = replace(config, model=ModelConfig(hidden=(int(hidden),)))
            label = "hybrid-tau4" if mode == "hybrid" else "sync"
            made(root / f"{label}-seed{seed}-{number:08x}", config, auc)
    return root


def test_sweeps_that_share_a_folder_are_told_apart_and_paired_with_their_own_sync(tmp_path):
    root = two_models(tmp_path / "sweep", {
        "hybrid 8": {0: 0.70, 1: 0.71}, "sync 8": {0: 0.702, 1: 0.714},
        "hybrid 16": {0: 0.80, 1: 0.81}, "hybrid 32": {0: 0.9},
        "sync 16": {1: 0.815, 0: 0.807},
    })  # fmt: skip
    text = write_page(root, tmp_path / "page.html").read_text()
    rows = [re.sub(r"<[^>]+>", " ", row).split() for row in text.split("<tr>")]
    of = {tuple(row[:3]): row for row in rows if row[1:2] == ["(model.hidden"]}
    assert of["hybrid-tau4", "(model.hidden", "[8])"][3:7] == ["4", "2", "0.7050", "-3.00"]
    assert of["hybrid-tau4", "(model.hidden", "[16])"][3:7] == ["4", "2", "0.8050", "-6.00"]
    assert of["hybrid-tau4", "(model.hidden", "[32])"][3:7] == ["4", "1", "0.9000", "-"]
    assert "hybrid: 3 different configs, which differ in model.hidden, and are told apart" in text


def test_two_sweeps_pair_equal_configs_where_a_label_has_several(tmp_path):
    first = two_models(tmp_path / "a", {"hybrid 8": {0: 0.7}, "hybrid 16": {0: 0.8}})
    second = two_models(tmp_path / "b", {"hybrid 16": {0: 0.81}, "hybrid 32": {0: 0.9}})
    told = comparison(first, second)
    assert re.search(r"hybrid-tau4 \(model.hidden \[16\]\) +1 +0.8000 +0.8100 +\+10.00", told)
    assert "in one of them only: hybrid-tau4 (model.hidden [8]), hybrid-tau4 (model.hidden" in told
    assert "A: hybrid: 2 different configs" in told and "+100" not in told
    other = two_models(tmp_path / "c", {"hybrid 64": {0: 0.75}})
    only = two_models(tmp_path / "d", {"hybrid 8": {0: 0.7}})
    told = comparison(only, other)
    assert "+50.00" in told, "sweeps of one model each: that is the question"
    assert "hybrid-tau4: A and B differ in model.hidden [8] and [64]" in told


def test_a_sync_on_other_data_is_no_reference(tmp_path):
    root = sweep(tmp_path / "sweep", {0: 0.7, 1: 0.71})
    for seed in range(2):
        config = replace(BASE, seed=seed, data=DataConfig(name="adult"))
        made(root / f"sync-seed{seed}-0123abcd", config, 0.9)
    text = write_page(root, tmp_path / "page.html").read_text()
    assert "0.7050" in text and "-195.00" not in text
    for seed in range(2):
        made(root / f"sync-seed{seed}-0123abcd", replace(BASE, seed=seed, steps=8), 0.9)
    assert "-195.00" in write_page(root, tmp_path / "page.html").read_text()


def test_other_data_under_one_label_are_another_setting(tmp_path):
    root = sweep(tmp_path / "sweep", {0: 0.70})
    for number, schema in enumerate(({"columns": [{"name": "a"}]}, {"columns": [{"name": "b"}]})):
        run = made(root / f"hybrid-tau4-seed{number + 1}-{number:08x}", hybrid(seed=number + 1))
        summary = json.loads((run / "summary.json").read_text())
        write_json(run / "summary.json", summary | {"data": {"sha256": "0", "schema": schema}})
    text = write_page(root, tmp_path / "page.html").read_text()
    assert "hybrid: 3 different configs, which differ in data" in text


def test_seeds_that_draw_a_synthetic_stream_anew_are_one_setting():
    drawn = {0: "synthetic", 1: "synthetic:default:1:2", 2: "synthetic:default:1:3"}
    runs = []
    for seed, name in drawn.items():
        config = {"seed": seed, "data": {"name": name}, "sync": {"mode": "sync"}}
        summary = {"tasks": {"click": {"auc": 0.7}}, "seed": seed, "data": {"sha256": str(seed)}}
        runs.append(RunFolder(Path(f"sync-seed{seed}-0"), "done", config, {}, summary, ""))
    settings, notes = settings_of(runs)
    assert [sorted(setting.aucs) for setting in settings] == [[0, 1, 2]] and notes == []
    pinned = replace(runs[1], config=runs[1].config | {"data": {"name": drawn[2]}})
    assert len(settings_of([runs[0], pinned])[0]) == 2, "another draw than the seed's is other data"


@pytest.mark.parametrize("name", ["00000000", "ffffffff"], ids=["path first", "path last"])
def test_of_two_runs_with_one_seed_the_later_counts_and_the_other_is_said(tmp_path, name):
    root = sweep(tmp_path / "sweep", {0: 0.70, 1: 0.71})
    early = made(root / f"hybrid-tau4-seed0-{name}", hybrid(), 0.5) / "env.json"
    early.write_text(early.read_text().replace("2026-01-02", "2025-01-02"))
    ((setting,), _) = settings_of(runs_below(root))
    assert setting.aucs == {0: 0.70, 1: 0.71}
    assert early.parent not in setting.folders.values()
    text = write_page(root, tmp_path / "page.html").read_text()
    assert "0.7050" in text
    assert "hybrid-tau4: 1 run left out, of a seed that ran again later" in text


def drawn(chart: str, name: str) -> np.ndarray:
    """The points of a line in a chart, float64 [points, 2], downwards."""
    path = re.search(rf'<g id="{name}">\s*<path d="([^"]+)"', chart)[1]
    return np.array(re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path), float)


NONE = float("nan")


def test_a_chart_draws_each_line_to_scale():
    lines = {"one": [(0, 0.5, NONE), (50, 0.6, NONE), (100, 0.7, NONE)],
             "other": [(0, 0.7, NONE), (100, 0.5, NONE)]}  # fmt: skip
    chart = line_chart({"test AUC": lines}, "samples")
    one, other = (drawn(chart, f"test AUC {number}") for number in range(2))
    assert one[1] == pytest.approx((one[0] + one[2]) / 2)
    assert one[2, 0] > one[0, 0] and one[2, 1] < one[0, 1], "SVG counts downwards"
    assert other == pytest.approx(np.array([[one[0, 0], one[2, 1]], [one[2, 0], one[0, 1]]]))
    assert ">samples<" in chart and ">test AUC<" in chart
    assert line_chart({"test AUC": lines}, "samples") == chart


def test_a_page_speaks_of_judged_rows_only_beside_a_curve_of_them(tmp_path):
    config = replace(BASE, evaluation=EvaluationConfig(test_rows=300))
    run = made(tmp_path / "run", config)
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"updates": 4, "wall_s": 0.31}
    summary["training_loss"] = {"updates_per_point": 1, "points": [0.7, 0.6, 0.5, 0.4]}
    (run / "summary.json").write_text(json.dumps(summary))
    text = write_page(run).read_text()
    assert "After so many training samples." in text and "after all pushes" not in text
    assert "0.31 s" in text, "not 0 s"


@pytest.mark.parametrize("name", ["a & b", "_hidden", "$x^$"])
def test_a_chart_names_its_lines_as_their_tasks_are_called(name):
    chart = line_chart({"y": {name: [(0, 0.5, NONE), (50, 0.6, NONE)]}}, "x")
    assert f">{html.escape(name)}<" in chart


def test_a_sweep_is_paired_with_its_sync_and_drawn_against_lateness_with_intervals(tmp_path):
    root = sweep(tmp_path / "sweep", {0: 0.70, 1: 0.71})
    sweep(root, {0: 0.702, 1: 0.714}, mode="sync")
    text = write_page(root, tmp_path / "page.html").read_text()
    half = stats.t.ppf(0.975, 1) * np.std([-2, -4], ddof=1) / np.sqrt(2)
    assert f"-3.00 ± {half:.2f}" in text and "4 runs: 4 done" in text
    [chart] = pictures(text)
    for name in ("test AUC 0", "test AUC 1", "gap to sync [1e-3] 0"):
        assert f'id="{name}"' in chart
    bars = re.findall(r'id="LineCollection_\d+"', chart)
    assert len(bars) == 3 and ">updates that rows miss<" in chart


def on(part: str, config: TrainConfig) -> TrainConfig:
    return replace(config, evaluation=replace(config.evaluation, eval_split=part))


@pytest.mark.parametrize("part", ["validation", "test"])
def test_a_page_says_on_which_part_its_curves_were_judged(part, tmp_path):
    root = tmp_path / "sweep"
    for seed in range(2):
        run = made(root / f"hybrid-tau4-seed{seed}-0123abcd", on(part, hybrid(seed=seed)))
        evaluate_twice(run, "click")
    other = {"validation": "test", "test": "validation"}[part]
    for page in (write_page(run), write_page(root)):
        text = "".join([page.read_text(), *pictures(page.read_text())])
        assert f'id="{part} AUC 0"' in text and f"{other} AUC" not in text


def test_a_sync_judged_on_another_part_is_no_reference(tmp_path):
    root = sweep(tmp_path / "sweep", {0: 0.70, 1: 0.71})
    for seed in range(2):
        made(root / f"sync-seed{seed}-0123abcd", on("validation", replace(BASE, seed=seed)), 0.9)
    text = write_page(root).read_text()
    assert "0.7050" in text and "-195.00" not in text
    [chart] = pictures(text)
    assert 'id="AUC 0"' in chart and "test AUC" not in chart, "its points are of both parts"


@pytest.mark.parametrize("part", ["validation", "test"])
def test_delong_names_the_rows_that_it_is_of(part, tmp_path):
    folders = [made(tmp_path / name, on(part, BASE)) for name in "ab"]
    for number, folder in enumerate(folders):
        scores = LABELS + np.arange(len(LABELS))[:, None] * (0.3 + number)
        (folder / "predictions.npz").write_bytes(npz(labels=LABELS, predictions=scores))
    told = comparison(*folders)
    assert f"click, 8 {part} samples: " in told and f"over {part} samples (DeLong)" in told


def test_the_page_of_a_sweep_shows_each_label_with_its_own_gaps(tmp_path):
    root = tmp_path / "sweep"
    aucs = {"sync": (0.70, 0.80), "hybrid": (0.69, 0.83)}
    for mode, (click, like) in aucs.items():
        for seed in range(2):
            config = hybrid(seed=seed) if mode == "hybrid" else replace(BASE, seed=seed)
            label = "hybrid-tau4" if mode == "hybrid" else mode
            run = made(root / f"{label}-seed{seed}-0123abcd", config)
            summary = json.loads((run / "summary.json").read_text())
            tasks = {"click": {"auc": click + seed / 100}, "like": {"auc": like + seed / 100}}
            write_json(run / "summary.json", summary | {"tasks": tasks})
    text = write_page(root).read_text()
    _, *sections = re.split(r"<h2>AUC of (\w+) against lateness</h2>", text)
    of_task = dict(zip(sections[::2], sections[1::2], strict=True))
    assert list(of_task) == ["click", "like"]
    assert "-10.00 ± 0.00" in of_task["click"] and "+30.00" not in of_task["click"]
    assert "+30.00 ± 0.00" in of_task["like"] and "0.8350" in of_task["like"]


def test_runs_of_a_sweep_have_pages_that_it_links_to(tmp_path):
    root = sweep(tmp_path / "sw eep", {0: 0.70, 1: 0.71})
    made(root / "hybrid-tau4-seed2-0000dead", hybrid(seed=2), metrics_jsonl="5\n")
    text = write_page(root, tmp_path / "page.html").read_text()
    links = re.findall(r'<a href="([^#"]+)">([^<]+)</a>', text)
    assert [name for _, name in links] == [f"hybrid-tau4-seed{seed}-0123abcd" for seed in (0, 1)]
    for link, name in links:
        assert f"Run {name}" in (tmp_path / unquote(link)).read_text()
    assert "hybrid-tau4-seed2-0000dead" in text, "its page cannot be made, the sweep's can"


def test_gauc_says_over_how_many_users_and_warnings_stand_on_the_page(tmp_path):
    run = made(tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    scores = {"auc": 0.7, "gauc": 0.65, "gauc_groups": 1392, "gauc_groups_left_out": 7}
    write_json(run / "summary.json", summary | {"tasks": {"click": scores}, "warnings": ["odd"]})
    text = write_page(run).read_text()
    assert "0.6500 over 1,392 users" in text and "gauc groups" not in text
    assert ">odd<" in text


def test_nothing_of_a_page_overflows_on_a_phone_or_on_a_desk(tmp_path):
    root = sweep(tmp_path / "sweep", {0: 0.70, 1: 0.71})
    for run in root.iterdir():
        evaluate_twice(run, "click")
    for page in (write_page(root), *root.glob("*-seed0-*/report.html")):
        widths = browser.measured(page, (400, 1300), tmp_path)
        for width, told in widths.items():
            assert told["content"] <= width and told["outside"] == [] and told["blank"] == 0


def test_a_page_shows_what_files_hold_as_text_and_never_as_markup(tmp_path):
    """`<script>` in twelve places and folders: task, score, note, data, words typed, commit..."""
    evil = "<script>alert(1)</script>"
    run = made(tmp_path / "<script>" / "<script>-seed0-0123abcd")
    scores = {"auc": 0.7, evil: 0.5}
    summary = json.loads((run / "summary.json").read_text()) | {
        "mode": evil, "tasks": {evil: scores}, "evaluated_on": evil,
        "staleness": {evil: 1.0, "kind": evil}, "data": {evil: evil, "name": evil},
    }  # fmt: skip
    write_json(run / "summary.json", summary)
    about = json.loads((run / "env.json").read_text())
    write_json(run / "env.json", about | {"commit": evil, evil: evil, "packages": {evil: evil}})
    write_json(run / "command.json", {"train": [evil]})
    evaluate_twice(run, evil)
    text = write_page(run, tmp_path / "page.html").read_text()
    [chart] = pictures(text)
    assert "<script" not in (text + chart).lower() and "&lt;script" in chart
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 12
    text = write_page(run.parent, tmp_path / "sweep.html").read_text()
    assert "<script" not in text and "Sweep &lt;script&gt;" in text and "%3Cscript%3E" in text
