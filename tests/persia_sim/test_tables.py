"""`Workload.tables`: tables of their own are what fields that are alike were, and add up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from persia_sim.base.popularity import expected_distinct
from persia_sim.cluster.demand import demand
from persia_sim.cluster.memory import FORMATS, capacity, fill_s
from persia_sim.cluster.tables import Table
from persia_sim.cluster.workload import Workload
from persia_sim.presets.catalogue import CLUSTERS, costs_of, workloads
from persia_sim.presets.from_file import find_workload, read_workload, workload_text
from persia_sim.report.row_staleness import row_staleness
from persia_sim.sharded.presets import ranker_of, read_model
from tests.persia_sim.hand_world import hand_scenario

ALIKE = dict.fromkeys(("fields", "dim"), 0) | {"rows": 0.0, "ids_per_field": 1.0, "zipf": 1.05}


def parted(work: Workload, pieces: int) -> Workload:
    """The same fields, as so many tables and the rest."""
    (alike,) = work.alike
    tables = [replace(alike, count=1, name=f"t{n}") for n in range(pieces)]
    if rest := work.fields - pieces:
        tables.append(replace(alike, count=rest))
    return replace(work, **ALIKE, tables=tuple(tables))


@pytest.mark.parametrize("name", workloads())
def test_a_workload_without_tables_is_one_table_to_the_bit(name):
    """Of every preset, on clusters with fitted and with borrowed costs."""
    work = workloads()[name]
    one = parted(work, 0)
    for preset in ("v100-paper", "gcp-100t", "h100-host"):
        scenario = hand_scenario(cluster=CLUSTERS[preset](), workload=work, costs=costs_of(preset))
        for mode in ("sync", "lookahead", "hybrid", "async"):
            asked = replace(scenario, mode=mode)
            assert repr(demand(asked, 0.1)) == repr(demand(replace(asked, workload=one), 0.1))
        for samples in (None, 1e9):
            held = [
                capacity(scenario.cluster, w, FORMATS["fp16-lean"], samples) for w in (work, one)
            ]
            assert held[0] == held[1]
    assert fill_s(work, 1e6, work.rows / 3) == fill_s(one, 1e6, work.rows / 3)
    assert row_staleness(np.arange(9), work) == row_staleness(np.arange(9), one)
    assert replace(ranker_of(one), source="") == replace(ranker_of(work), source="")


def test_cutting_the_fields_into_tables_changes_nothing():
    work = workloads()["criteo-ad"]
    three = parted(work, 3)
    assert len(three.tables) == 4 and three.fields == work.fields
    for name in ("ids_per_batch", "distinct_ids", "rows_bytes", "push_bytes", "activation_bytes"):
        assert getattr(three, name) == pytest.approx(getattr(work, name), rel=1e-12), name
    assert three.layer_params == work.layer_params
    assert three.pending_fraction(5) == pytest.approx(work.pending_fraction(5), rel=1e-12)
    assert three.server_shares(7) == pytest.approx(work.server_shares(7), rel=0.02)
    small = CLUSTERS["h100-host"]()
    small = replace(small, servers=replace(small.servers, ram_bytes_per_process=4e8))
    for samples in (None, 1e7):
        one, cut = (capacity(small, w, FORMATS["f32-adagrad"], samples) for w in (work, three))
        assert one.resident_rows < work.rows and cut.resident_rows == pytest.approx(
            one.resident_rows, rel=1e-3
        )
        assert cut.miss_rate == pytest.approx(one.miss_rate, rel=0.01)
    rows = work.rows / 3
    assert fill_s(three, 1e6, rows) == pytest.approx(fill_s(work, 1e6, rows), rel=1e-3)


TWO = (
    Table(name="user", rows=1e6, dim=8, zipf=0.5),
    Table(name="item", fields=("item", "seen"), rows=1000, dim=32, ids_per_sample=(1.0, 2.0)),
)


def test_tables_of_two_kinds_are_added_by_hand():
    work = Workload(
        name="two", tables=TWO, mlp=(4, 1), dense_params=900, dense_flops=6000.0,
        batch_per_rank=100, source="me",
    )  # fmt: skip
    users, items = expected_distinct(100, 1e6, 0.5), expected_distinct(300, 1000, 1.05)
    assert (work.fields, work.rows, work.dim) == (3, 1_001_000, 0)
    assert work.ids_per_batch == pytest.approx(400)
    assert work.distinct_ids == users + items
    assert work.rows_bytes == pytest.approx(4 * (8 * users + 32 * items))
    assert work.push_bytes == pytest.approx((8 + 32) * users + (8 + 128) * items)
    assert work.activation_bytes == 2 * 100 * (8 + 2 * 32)
    assert work.input_width == 72 and work.kept_dim == pytest.approx((8e6 + 32_000) / 1_001_000)
    # The network's own figures stand beside the layers, which only part the weights.
    assert (work.weights, work.flops_per_sample) == (900, 6000)
    assert work.layer_params == (round(900 * 73 * 4 / (73 * 4 + 5)), 900 - 885)
    ranker = ranker_of(work)
    assert (ranker.tables, ranker.dense_params, ranker.dense_macs) == (TWO, 900, 1000)


def test_a_file_says_tables_and_is_written_as_it_is_read(tmp_path):
    two = parted(replace(workloads()["kwai-video"], rows=88e6), 2)
    for work in (*workloads().values(), two):
        path = tmp_path / "work.toml"
        path.write_text(workload_text(work))
        assert read_workload(path) == work
        assert find_workload(str(path)) == read_model(path) == work
    path.write_text('base = "criteo-ad"\n[[tables]]\nrows = 5e6\ndim = 4\ncount = 2\n')
    based = read_workload(path)
    assert (based.fields, based.rows, based.dim, based.dense_features) == (2, 1e7, 4, 13)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rows = 7\n[[tables]]\nrows = 5\ndim = 4", "rows is 7.*say it"),
        ("", "fields is missing.*tables"),
        ("[[tables]]\nrows = 5\ndim = 4\nfields = ['a', 'b']", "a name for each of its 1"),
        (2 * "[[tables]]\nrows = 5\ndim = 4\nname = 'a'\n", "is a: names .* must differ"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path, text, words):
    path = tmp_path / "work.toml"
    path.write_text(f"batch_per_rank = 8\n{text}\n")
    with pytest.raises(ValueError, match=words):
        read_workload(path)
