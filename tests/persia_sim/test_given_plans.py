"""Plans that are given table by table: what each GPU has, what is refused, and why several machines
are slower than one."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from persia_sim.cli.sharded import ShardedOptions, run_sharded
from persia_sim.cluster.machine import System
from persia_sim.presets.from_file import read_plan
from persia_sim.sharded.plan import PlacedAs, PlacedTable, Strategy, given_plan, make_plan
from persia_sim.sharded.ranker import Table
from persia_sim.sharded.stages import collectives_s, host_s, stages, step_s
from tests.persia_sim.test_gpu_sharded import BARE, FOUR, HOST, job

MIXED = (
    PlacedTable(table=0, kind=PlacedAs.TABLE_WISE, ranks=(3,)),
    PlacedTable(table=1, kind=PlacedAs.ROW_WISE, ranks=(0, 1)),
    PlacedTable(table=2, kind=PlacedAs.COLUMN_WISE, ranks=(2, 3)),
    PlacedTable(table=3, kind=PlacedAs.DATA_PARALLEL),
)


def test_each_kind_of_placement_gives_each_gpu_its_part():
    """Tables of 1,000 rows of 10 numbers and one id. Rows: half of the ids, and a partial sum of
    the whole vector from each. Columns: every id, half of each vector. A copy: nothing."""
    found = given_plan(FOUR, 4, MIXED)
    assert found.sharded.ids.tolist() == [0.5, 0.5, 1.0, 2.0]
    assert found.sharded.elements.tolist() == [5.0, 5.0, 5.0, 15.0]
    assert found.sharded.sent.tolist() == [10.0, 10.0, 5.0, 15.0]
    assert found.sharded.bytes.tolist() == [20e3, 20e3, 20e3, 60e3]
    assert found.sharded.vectors.tolist() == [1, 1, 1, 2]
    assert (found.local_ids, found.local_elements, found.replicated_values) == (1, 10, 10_000)
    assert found.replicated_bytes == 40e3 and not found.partial_sums


@pytest.mark.parametrize(
    ("strategy", "placements"),
    [
        (Strategy.TABLE, [(PlacedAs.TABLE_WISE, (table,)) for table in range(4)]),
        (Strategy.ROW, [(PlacedAs.ROW_WISE, (0, 1, 2, 3))] * 4),
        (Strategy.COLUMN, [(PlacedAs.COLUMN_WISE, (3, 2, 1, 0))] * 4),
        (Strategy.DATA_PARALLEL, [(PlacedAs.DATA_PARALLEL, ())] * 4),
    ],
)
def test_a_plan_that_a_strategy_makes_costs_the_same_when_it_is_given(strategy, placements):
    given = tuple(
        PlacedTable(table=table, kind=kind, ranks=ranks)
        for table, (kind, ranks) in enumerate(placements)
    )
    made = make_plan(FOUR, 4, strategy)
    found = given_plan(FOUR, 4, given)
    for name in ("ids", "elements", "sent", "bytes", "vectors"):
        assert getattr(found.sharded, name) == pytest.approx(getattr(made.sharded, name))
    assert found.partial_sums == made.partial_sums
    assert found.replicated_values == made.replicated_values
    by_strategy = job(software=replace(BARE, strategy=strategy))
    priced = step_s(replace(by_strategy, placements=given))
    if strategy is Strategy.COLUMN:  # keys to all four: one of all-to-all, one of an all-gather
        assert priced == pytest.approx(step_s(by_strategy), rel=0.5)
    else:
        assert priced == pytest.approx(step_s(by_strategy), rel=1e-9)


def test_keys_of_a_table_in_columns_travel_to_each_of_them():
    plain = tuple(PlacedTable(table=t, kind=PlacedAs.TABLE_WISE, ranks=(t,)) for t in range(4))
    cut = (*plain[:3], PlacedTable(table=3, kind=PlacedAs.COLUMN_WISE, ranks=(0, 1)))
    few, more = (stages(job(placements=placements)).keys_s for placements in (plain, cut))
    assert more == pytest.approx(few * 5 / 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda plan: plan[:3], "must place each of the model's 4 tables .* table 3 is missing"),
        (lambda plan: [*plan, plan[0]], "drop what is twice or not there"),
        (lambda plan: [*plan[:3], {**plan[3], "kind": "row_wise"}], "row_wise needs one or more"),
        (lambda plan: [{**plan[0], "ranks": [0, 1]}, *plan[1:]], "table_wise needs just one"),
        (lambda plan: [{**plan[0], "ranks": [4]}, *plan[1:]], r"lie in \[0, 3\]: there are 4 GPUs"),
        (lambda plan: [*plan[:1], {**plan[1], "ranks": [0, 0]}, *plan[2:]], "stand only once"),
        (lambda plan: [{**plan[0], "kind": "rows"}, *plan[1:]], "kind.*rows"),
        (lambda plan: {"tables": plan}, "must be a list of tables' placements"),
    ],
)
def test_a_wrong_plan_is_refused_with_what_is_wrong(tmp_path, change, said):
    plan = [
        {"table": each.table, "kind": str(each.kind), "ranks": list(each.ranks)} for each in MIXED
    ]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    assert read_plan(path) == MIXED
    path.write_text(json.dumps(change(plan)))
    with pytest.raises(ValueError, match=said):
        given_plan(FOUR, 4, read_plan(path))


def test_a_bad_plan_is_priced_and_beaten_on_the_screen(tmp_path):
    """All 26 tables of DLRM on the first of eight GPUs."""
    plan = [{"table": table, "kind": "table_wise", "ranks": [0]} for table in range(26)]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    asked = {"model": "dlrm", "system": "dgx-h100", "anyway": True}
    said = run_sharded(ShardedOptions(plan=path, **asked)).splitlines()
    [beaten] = [line for line in said if line.startswith("beaten by")]
    assert f"plan          {path}: the busiest GPU reads 8.00 times the mean" in said
    assert "--strategy " in beaten and "+" in beaten
    with pytest.raises(ValueError, match="--plan says where each table lies"):
        run_sharded(ShardedOptions(plan=path, strategy=Strategy.ROW, **asked))


def test_two_machines_stand_beside_one_stage_by_stage():
    said = run_sharded(ShardedOptions(model="dlrm-dcnv2", system="dgx-h100", gpus=16))
    lines = {
        line[2:33].strip(): line[33:].split() for line in said.splitlines() if line[:2] == "  "
    }
    assert "of 2 machines; of one; more" in said
    for name in ("keys, all to all", "exchange", "input to the GPUs", "step"):
        here, one, more = map(float, lines[name])
        assert more == pytest.approx(here - one, abs=2e-3)
    assert float(lines["keys, all to all"][2]) > 0 and float(lines["step"][2]) > 0
    assert float(lines["host: key sizes and collectives"][0]) > 0
    alone = run_sharded(ShardedOptions(model="dlrm-dcnv2", system="dgx-h100", anyway=True))
    assert "of one; more" not in alone and "keys, all to all" in alone


def test_the_hosts_collectives_are_a_part_of_its_time():
    """A core of speed 2: 1 ms for collectives and 2 ms for exchanges, none on one GPU."""
    soft = replace(BARE, host_multi_s=1e-3, host_exchange_s=2e-3, host_s=5e-3)
    system = System(host=replace(HOST, core_speed=2.0), gpus=4)
    found = job(software=soft, system=system)
    assert collectives_s(found) == pytest.approx(1.5e-3)
    assert host_s(found) == pytest.approx(4e-3)
    assert collectives_s(replace(found, system=replace(system, gpus=1))) == 0
    copied = replace(found, software=replace(soft, strategy=Strategy.DATA_PARALLEL))
    assert collectives_s(copied) == pytest.approx(0.5e-3)


def test_tables_that_are_alike_are_numbered_one_by_one():
    two = replace(FOUR, tables=(Table(rows=10, dim=4, count=2), Table(rows=99, dim=8)))
    placed = tuple(PlacedTable(table=t, kind=PlacedAs.TABLE_WISE, ranks=(t,)) for t in range(3))
    assert np.array_equal(given_plan(two, 3, placed).sharded.elements, [4, 4, 8])
