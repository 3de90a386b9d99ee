"""Memory of rows, in bytes, rows and hours, against figures worked out on paper."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf, log

import pytest

from persia_sim.engine.simulate import simulate
from persia_sim.insight.report import (
    report,
    text,
)
from persia_sim.model.memory import FORMATS, Capacity, RowFormat, capacity, fill_s
from persia_sim.model.workload import Wire
from tests.persia_sim.hand_world import HAND, hand_scenario, hand_workload, line, sync_of_two
from tests.persia_sim.oracles import resident_after


def test_memory_of_rows_in_bytes() -> None:
    """Four servers of 1,000 bytes; a row of 8 numbers of 2 bytes, 1.5 x 4 bytes of state each."""
    rows = RowFormat(
        name="x", value_bytes=2, state_values_per_value=1.5, state_bytes=4, overhead_bytes=26.0,
        source=HAND,
    )  # fmt: skip
    assert rows.row_bytes(8) == 8 * 2 + 8 * 6 + 26 == 90
    base = hand_scenario()
    part = replace(base.cluster.servers, processes_per_host=2, hosts=2, ram_bytes_per_process=1e3)
    cluster = replace(base.cluster, servers=part)
    held = capacity(cluster, hand_workload(rows=60.0), rows)
    # 11 rows fit into 1,000 bytes, 44 into the four servers; 60 rows want 1,350 bytes each.
    assert (held.nominal_rows, held.resident_rows, held.evicted_rows) == (60, 44, 16)
    assert (held.row_bytes, held.bytes_per_server) == (90, 1350)
    assert held.limit_bytes_per_server == 1000 and not held.fits
    # The least used rows are the ones that miss.
    assert 0 < held.miss_rate < 16 / 60 * exp(4 / 20)
    with pytest.raises(
        ValueError, match=r"on hand, but 60 rows of 90 bytes need 1.32 KiB: use at least 6 servers"
    ):
        held.refuse(cluster)
    uniform = capacity(cluster, hand_workload(rows=60.0, zipf=0.0), rows)
    # 8 draws a batch from 20 values: a row is forgotten T draws after its last, e^(-T/20) = 16/60;
    # half a batch of these lies in the batch itself, which asks for the row once.
    assert uniform.miss_rate == pytest.approx(16 / 60 * exp(4 / 20), rel=1e-6)
    each = replace(hand_workload(rows=60.0, zipf=0.0), wire=Wire(deduplicate=False))
    assert capacity(cluster, each, rows).miss_rate == pytest.approx(16 / 60, rel=1e-6)
    full = capacity(cluster, hand_workload(rows=44.0), rows)
    assert (full.fits, full.evicted_rows, full.miss_rate) == (True, 0, 0)
    full.refuse(cluster)


def test_bytes_of_the_named_row_formats() -> None:
    """128 numbers of 2 or 4 bytes, Adagrad's sum for each, and 90 or 66 bytes beside them."""
    found = {name: rows.row_bytes(128) for name, rows in FORMATS.items()}
    assert found == {"fp16-lean": 256 + 90, "f32-adagrad": 512 + 512 + 66,
                     "f32-adam": 512 + 1024 + 66, "f32-sgd": 512 + 66}  # fmt: skip
    for field, value in (("value_bytes", 0), ("overhead_bytes", -1.0)):
        with pytest.raises(ValueError, match=f"{field} is {value}: must be >= "):
            replace(FORMATS["f32-sgd"], **{field: value})
    assert replace(FORMATS["f32-sgd"], value_bytes=1, overhead_bytes=0.0).row_bytes(3) == 3


def test_the_servers_in_the_refusal_hold_whole_rows() -> None:
    """A server of 1,000 bytes holds one row of 600, so ten rows need ten servers, not six."""
    tight = Capacity(10, 4, 600.0, 1500.0, 1000.0, 0.1, 4)
    with pytest.raises(ValueError, match="use at least 10 servers, a leaner row format"):
        tight.refuse(hand_scenario().cluster)
    large = Capacity(10, 4, 600 * 2.0**30, 1500.7 * 2**30, 1000.7 * 2**30, 0.1, 4)
    with pytest.raises(ValueError, match=r"is 1,001 GiB on hand, but 10 rows .* need 1,501 GiB"):
        large.refuse(hand_scenario().cluster)
    never = Capacity(10, 0, 6000.0, 1500.0, 1000.0, 1.0, 0)
    with pytest.raises(ValueError, match="use a leaner row format"):
        never.refuse(hand_scenario().cluster)


def test_memory_line_in_gib_bytes_rows_and_hours() -> None:
    held = Capacity(60.0, 44.0, 345.6, 2560.75 * 2**30, 1280.75 * 2**30, 0.0123, 44.0)
    uniform = hand_workload(rows=60.0, zipf=0.0)
    run = simulate(replace(sync_of_two(), workload=uniform))
    # 2 draws a sample and field, 8 samples a step: 20 (1 - e^(-n/20)) rows a field after n draws.
    draws, rate = -20 * log(1 - 0.9 * 44 / 60), report(run).samples_per_s.mean
    assert fill_s(uniform, rate, 0.9 * 44) == pytest.approx(draws / 2 / rate)
    assert fill_s(uniform, rate, 60.0) == inf
    slow = replace(report(run, held), samples_per_s=replace(report(run).samples_per_s, mean=1e-3))
    hours = draws / 2 / 1e-3 / 3600
    assert line(text(slow), "memory") == (
        "1,281 GiB a server, where all rows would need 2,561 GiB, 346 B a row; "
        "resident 44, evicted 16, misses 1.23%; "
        f"90 % full after {hours:.1f} h"
    )


def test_rows_touched_by_samples() -> None:
    """Two equally likely rows a field, 6 draws of each field: 2 (1 - 2^-6) rows, three fields."""
    work = hand_workload(rows=6.0, zipf=0.0)
    assert resident_after(work, 3.0) == pytest.approx(3 * 2 * (1 - 2.0**-6))
