"""The roofline: what a step must do, by hand, and what its bound and the shares of it are."""

from __future__ import annotations

import re

import numpy as np
import pytest

from experiments.benching import bench_peers, roofline, wide, windows
from experiments.benching.roofline import BatchSizes, MachineRates, Work, rows_of_table, works
from experiments.benching.windows import Window
from runtime.embedding.batch_rows import FieldVectors
from runtime.embedding.config import RowOptimizer, TableConfig
from runtime.embedding.native.plan import Pooling
from tests.experiments.raw_runs import read_csv
from tests.experiments.test_benching import SMALL, Quiet, printed

BATCH = BatchSizes(
    samples=100, ids=2600, distinct=1000.0, fields=26, dim=16, layers=((429, 8), (8, 1))
)


def test_what_each_stage_must_do_by_hand():
    by_stage = {work.stage: work for work in works(BATCH)}
    vectors, rows = 100 * 26 * 16 * 4, 1000 * 64
    assert by_stage["merge"] == Work("merge", bytes=2600 * 8 + 2600 * 4 + 1000 * 8)
    # A group of the index, a record, and one line of values; the state is not read.
    assert by_stage["lookup"].lines == 3000
    assert by_stage["lookup"].bytes == rows + 1000 * 24
    assert by_stage["pool"].bytes == rows + 2600 * 4 + vectors
    assert by_stage["network"].flops == 6 * (429 * 8 + 8) * 100
    assert by_stage["network"].bytes == 28 * (429 * 8 + 8 + 9)
    assert by_stage["scatter"].bytes == vectors + 2600 * 4 + 2 * rows
    # A record, a line of values and one of Adagrad's sums.
    assert by_stage["update"].lines == 3000


def test_wide_rows_have_as_many_lines_as_they_fill():
    wider = BatchSizes(samples=1, ids=26, distinct=10.0, fields=26, dim=100, layers=((2613, 1),))
    by_stage = {work.stage: work for work in works(wider)}
    assert by_stage["lookup"].lines == (2 + 7) * 10  # 400 bytes are 6.25 lines
    assert by_stage["update"].lines == (1 + 13) * 10  # 800 bytes are 12.5


def test_the_longest_of_three_binds():
    rates = MachineRates(flops=1e9, bytes=1e8, lines=1e6)
    assert rates.bound(Work("x", flops=1e9, bytes=1e8, lines=2e6)) == (2.0, "lines")
    assert rates.bound(Work("x", flops=3e9, bytes=1e8, lines=2e6)) == (3.0, "flops")
    assert rates.bound(Work("x", flops=3e9, bytes=4e8, lines=2e6)) == (4.0, "bytes")


def test_the_step_is_the_sum_of_its_stages_and_the_two_furthest_are_named():
    rates = MachineRates(flops=1e9, bytes=1e8, lines=1e6)
    took = {
        "merge": 2.0,
        "lookup": 6.0,
        "pool": 4.0,
        "network": 100.0,
        "scatter": 5.0,
        "update": 4.0,
        "idle": 7.0,
    }
    windows_of = [Window(r, name, ms, 0.0, True) for r in range(3) for name, ms in took.items()]
    records = rows_of_table("wide", BATCH, rates, windows_of)
    *stages, step, idle = records
    assert [r["stage"] for r in records] == [*list(took)[:-1], "step", "idle"]
    assert idle["measured_ms"] == 7.0
    lookup = stages[1]
    assert (lookup["binds"], lookup["bound_ms"]) == ("lines", pytest.approx(3.0))
    assert lookup["share"] == pytest.approx(0.5)
    assert step["measured_ms"] == pytest.approx(121.0)
    assert step["bound_ms"] == pytest.approx(sum(r["bound_ms"] for r in stages))
    text = roofline.report("wide", rates, records, 2)
    of_rows_ms = step["bound_ms"] - stages[3]["bound_ms"]
    assert f"{100 / (100 + of_rows_ms):.3f} of dense-only at most" in text
    assert "furthest from the bound: network" in text
    assert re.search(r"^lookup .* lines +3\.00 +6\.00 +0\.50 +3/3$", text, re.MULTILINE)


def test_a_tiny_roofline_writes_what_it_prints(tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "ForeignLoad", Quiet)
    monkeypatch.setattr(roofline, "STREAMED_FLOATS", 1 << 12)
    monkeypatch.setattr(roofline, "REPEATS", 2)
    monkeypatch.setitem(bench_peers.SHAPES, "small", SMALL)
    told = printed(monkeypatch)
    bench_peers.run(bench_peers.Options(
        workloads=("small",), batch=32, threads=1, rounds=1, window_steps=3, roofline=True,
        out=tmp_path,
    ))  # fmt: skip
    rows = read_csv(tmp_path / "bench_peers_roofline.csv")
    stages = ["merge", "lookup", "pool", "network", "scatter", "update", "step", "idle"]
    assert [r["stage"] for r in rows] == stages
    assert all(float(r["measured_ms"]) > 0 and float(r["bound_ms"]) > 0 for r in rows[:-1])
    step_ms, idle_ms = (float(r["measured_ms"]) for r in rows[-2:])
    assert 0 <= idle_ms < step_ms
    assert float(rows[0]["lines_per_s"]) > 0
    for row in rows:
        line = next(line for line in told[0].splitlines() if line.startswith(row["stage"]))
        assert f"{float(row['measured_ms']):.2f}" in line


def test_stages_timed_in_a_step_train_as_the_store_does():
    """Rows after two windows are those of as many steps by hand, and the stages fill the step."""
    source = wide.wide_workload(batch=8, rows=260, batches=2)
    config = TableConfig(dim=2, optimizer=RowOptimizer(kind="sgd", lr=1.0))
    made, by_hand = (wide.full_store(source.layout, config, wide.wide_ids(260)) for _ in range(2))

    def loop(look, *, step_rows):
        def measure() -> float:
            for number in (0, 1, 0):
                look(number).sum().backward()
                step_rows()
            return 0.0

        return measure

    steps = roofline.StepsByStage(source, made, 2, 1, loop, skip=1)
    step_ms = [steps.window() for _ in range(2)]
    pooling = Pooling(source.layout.fields, {"rows": 2})
    ones = FieldVectors(np.ones((8, wide.FIELDS * 2), np.float32), {}, {})
    for step, number in enumerate((0, 1, 0, 0, 1, 0)):
        handle = by_hand.begin(0, step, source.batches[number])
        by_hand.servers[0].read(handle)
        rows = pooling.backward(handle.batch, handle.plans, ones)
        by_hand.servers[0].apply([(handle, rows)])
    for one, other in zip(made.export()["rows"], by_hand.export()["rows"], strict=True):
        np.testing.assert_array_equal(one, other)
    for took, whole_ms in zip(steps.windows, step_ms, strict=True):
        assert sum(took.values()) - took["idle"] == pytest.approx(whole_ms)
        assert 0 < took["update"] < whole_ms and 0 <= took["idle"] < whole_ms


def test_a_roofline_of_a_gpu_is_refused():
    with pytest.raises(ValueError, match="--roofline is of a CPU alone"):
        bench_peers.Options(roofline=True, where_time_goes=True)
