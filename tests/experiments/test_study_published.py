"""The studies beside the published figures: tables and summaries of tiny runs, recomputed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.published.descriptions import DATA
from experiments.studies import scale
from experiments.studies.scale import COLUMNS, Simulated, row_of, summary
from experiments.tables import table
from persia_sim.base.vocabulary import Mode
from persia_sim.engine.simulate import simulate
from persia_sim.presets.catalogue import CLUSTERS, costs_of, workloads
from persia_sim.presets.costs import FITS
from tests.experiments.raw_runs import printed_by, read_csv

pytestmark = pytest.mark.long  # its runs are made once, for all of its tests

STEPS = 8


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    return _run("workers", tmp_path_factory.mktemp("workers"), lambda *a: 1000.0 * a[3])


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    rates = {"async_averaging": 2e6}
    return _run("rows", tmp_path_factory.mktemp("sizes"), lambda *a: rates.get(a[2].value, 1.9e6))


def _run(over, out, rate):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale, "simulated", lambda *a: Simulated(rate(*a), 123_000.0))
        options = scale.Options(over=(over,), steps=STEPS, out=out)
        return out, printed_by(scale.run, options)


def test_published_points_reach_the_table_unchanged(workers):
    rows = read_csv(workers[0] / "scale_workers.csv")
    told = {(r["series"], r["gpus"], r["published"]) for r in rows if r["published"]}
    want = set()
    for row in read_csv(DATA / "throughput_public.csv"):
        series = f"{row['dataset']} {row['system']} {row['mode']}"
        want.add((series, row["gpus"], str(float(row["samples_per_s"]))))
    for row in read_csv(DATA / "throughput_kwai.csv"):
        want.add((f"kwai-video {row['mode']}", row["gpus"], str(float(row["samples_per_s"]))))
    assert told == want


def test_errors_are_model_over_published_minus_one_with_their_sign(workers):
    rows = read_csv(workers[0] / "scale_workers.csv")
    for row in rows:
        if row["published"]:
            error = (float(row["model"]) - float(row["published"])) / float(row["published"])
            assert float(row["error"]) == pytest.approx(error)
        else:
            assert row["error"] == "" and row["series"].startswith("criteo-ad")
    series = [r for r in rows if r["series"] == "taobao-ad Persia hybrid"]
    persia = {r["gpus"]: float(r["model"]) for r in series if "dashed" not in r["note"]}
    assert persia == {"1": 1000.0, "2": 2000.0, "4": 4000.0, "8": 8000.0}, "half of 2 GPUs at 1"


def test_all_that_was_measured_is_fitted_and_only_halved_bars_and_criteo_are_predicted(workers):
    for row in read_csv(workers[0] / "scale_workers.csv"):
        halved = "half of 2 GPUs" in row["note"]
        assert row["kind"] == ("prediction" if halved or not row["published"] else "fit"), row


def test_the_printed_summary_is_of_absolute_errors_by_kind(workers):
    rows = read_csv(workers[0] / "scale_workers.csv")
    for kind in ("fit", "prediction"):
        errors = [abs(float(r["error"])) for r in rows if r["kind"] == kind and r["error"]]
        mean, most = sum(errors) / len(errors), max(errors)
        said = f"{kind}: {len(errors)} points, mean |error| {mean:.1%}, largest {most:.1%}"
        assert said in workers[1]


def test_a_summary_counts_what_is_below_as_error_too():
    rows = [row_of("a", "x", 1, 100.0, 90.0, "fit"), row_of("a", "y", 2, 100.0, 120.0, "fit"),
            row_of("b", "z", 1, None, 5.0, "prediction")]  # fmt: skip
    assert summary(rows) == "fit: 2 points, mean |error| 15.0%, largest 20.0%"


def test_a_printed_line_has_published_model_and_signed_error():
    text = table([row_of("s", "2 GPUs", 2, 1000.0, 900.0, "fit", "why", 12_345.0)], COLUMNS)
    assert re.split(r" {2,}", text.splitlines()[2]) == [
        "s",
        "2 GPUs",
        "1,000",
        "900",
        "-10.0%",
        "12",
        "fit; why",
    ]


def test_one_level_is_held_out_of_each_size_in_turn(sizes):
    rows = read_csv(DATA / "throughput_model_size.csv")
    published = [float(r["samples_per_s"]) for r in rows if r["mode"] == "hybrid"]
    errors = []
    for own in published:
        others = (sum(published) - own) / (len(published) - 1)
        errors.append(abs(others / own - 1))
    mean = sum(errors) / len(errors)
    assert f"held out: mean |error| {mean:.1%}, largest {max(errors):.1%}" in sizes[1]
    assert f"fitted constants: {len(FITS)} of every cluster (" in sizes[1]
    assert "and the batch of this one (8,192 a rank)" in sizes[1]


def test_sizes_reach_their_table(sizes):
    rows = read_csv(sizes[0] / "scale_model_size.csv")
    hybrid = [r for r in rows if r["series"] == "100T cluster hybrid"]
    assert [r["label"] for r in hybrid] == ["6.25T", "12.5T", "25T", "50T", "100T"]
    late = next(r for r in rows if r["series"].endswith("async"))
    assert float(late["error"]) == pytest.approx(2e6 / float(late["published"]) - 1)


def test_the_speed_of_the_simulator_is_on_the_screen_and_in_no_table(workers):
    """Events over CPU seconds: of a simulation whose events are known."""
    assert " 123 " in workers[1] and "events_per_s" not in read_csv(
        workers[0] / "scale_workers.csv"
    )[0]  # fmt: skip
    work = workloads()["taobao-ad"]
    cluster = CLUSTERS["v100-2021-09"]().resized(2)
    clock = iter((10.0, 12.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale.time, "process_time", lambda: next(clock))
        found = scale.simulated_on(cluster, work, costs_of("v100-2021-09"), Mode.SYNC, 10)
    scenario = scale.scenario_of(
        cluster, work, costs_of("v100-2021-09"), Mode.SYNC, 10, scale.GPU_CV
    )
    assert found.events_per_s == simulate(scenario).events / 2.0


@pytest.mark.parametrize("stem", ["scale_workers", "scale_model_size"])
def test_the_committed_table_has_the_columns_that_the_study_writes(workers, sizes, stem):
    committed = Path(__file__).parents[2] / "docs" / "results" / f"{stem}.csv"
    made = (workers if stem == "scale_workers" else sizes)[0] / f"{stem}.csv"
    assert list(read_csv(committed)[0]) == list(read_csv(made)[0])
