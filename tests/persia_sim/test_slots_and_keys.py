"""Tables whose features are dealt whole to GPUs; how ids reach the GPUs that have their rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_sim.cluster.machine import Fabric, System
from persia_sim.cluster.tables import Table
from persia_sim.sharded.plan import Keys, Strategy, make_plan
from persia_sim.sharded.stages import stages
from tests.persia_sim.test_gpu_sharded import BARE, FOUR, HOST, RANKERS, job

WIDE_AND_DEEP = replace(
    FOUR,
    tables=(
        Table(rows=2600, dim=16, ids_per_sample=(1.0,) * 26),
        Table(rows=800, dim=1, ids_per_sample=(1.0, 1.0)),
    ),
)
"""26 features of one table, and a wide part with two."""


@given(RANKERS, st.integers(1, 9))
def test_slots_are_whole_and_every_gpu_has_room_for_those_of_the_fullest(ranker, gpus):
    """In turn, so numbers of features differ by one at most; rows of a table are even over its
    features."""
    load = make_plan(ranker, gpus, Strategy.SLOT).sharded
    assert load.ids.sum() == pytest.approx(ranker.ids)
    assert load.sent.sum() == pytest.approx(ranker.pooled)
    assert load.vectors.sum() == ranker.features
    assert load.vectors.max() - load.vectors.min() <= 1
    features = [
        4.0 * t.rows * t.dim / len(t.ids_per_sample)
        for t in ranker.tables
        for _ in range(t.count * len(t.ids_per_sample))
    ]
    fullest = max(sum(features[gpu::gpus]) for gpu in range(gpus))
    assert load.bytes.tolist() == pytest.approx([fullest] * gpus)


@pytest.mark.parametrize(("gpus", "most", "idle"), [(1, 26, 0), (8, 4, 0), (16, 2, 0), (32, 1, 6)])
def test_of_26_slots_the_fullest_of_8_gpus_has_4_and_the_wide_part_lies_in_rows(gpus, most, idle):
    """Of the wide part each GPU has its share of two ids, and partial sums of both features."""
    load = make_plan(WIDE_AND_DEEP, gpus, Strategy.SLOT).sharded
    assert load.ids.max() == pytest.approx(most + 2 / gpus)
    assert (load.ids < 1).sum() == idle
    assert load.sent.max() == most * 16 + 2 and load.vectors.max() == most + 2
    assert load.bytes.tolist() == pytest.approx([4 * (most * 100 * 16 + 800 / gpus)] * gpus)


def test_a_host_may_deal_each_gpu_the_keys_and_the_row_offsets_of_its_own_rows():
    """Two GPUs share a switch's 20 GB/s. In rows a GPU has a quarter of the four keys of 4,000
    samples and an offset for each of the four vectors; of whole tables one key and one offset. No
    keys are exchanged. Else each gets its own 1,000 samples' four keys, and they are."""
    dealt = replace(BARE, keys=Keys.DEALT)
    for strategy, numbers in ((Strategy.ROW, 1 + 4), (Strategy.TABLE, 1 + 1)):
        parts = stages(job(software=replace(dealt, strategy=strategy)))
        assert parts.input_s == pytest.approx(4000 * numbers * 8 / 10e9)
        assert parts.keys_s == 0
    own = stages(job())
    assert own.keys_s == pytest.approx(1000 * 32 * 3 / 4 / 100e9)
    assert own.input_s == pytest.approx(1000 * 32 / 10e9 + own.keys_s)
    alone = System(host=replace(HOST, gpus_per_switch=1), gpus=4)
    quicker = stages(job(software=replace(dealt, strategy=Strategy.ROW), system=alone)).input_s
    assert quicker == pytest.approx(4000 * 5 * 8 / 20e9)


def test_all_keys_and_offsets_may_go_to_one_gpu_and_from_it_to_the_others_of_its_machine():
    """Four keys and four offsets of each of 4,000 samples over a bus of 20 GB/s that nobody shares,
    then to three others over a link of 100 GB/s; on one GPU only over the bus. In a cube mesh of
    eight it has links to four, and sends to three over the bus."""
    to_all = replace(BARE, keys=Keys.TO_ALL)
    whole = 4000 * 8 * 8
    for gpus, machines in ((4, 1), (8, 2), (1, 1)):
        system = System(host=HOST, gpus=gpus)
        parts = stages(job(software=to_all, system=system))
        others = gpus / machines - 1
        assert parts.keys_s == pytest.approx(whole * others / 100e9)
        assert parts.input_s == pytest.approx(whole / 20e9 + parts.keys_s)
    for gpus, sent_s in ((8, 3 / 20e9), (4, 3 / 50e9)):
        mesh = System(host=replace(HOST, gpus=gpus, fabric=Fabric.MESH), gpus=gpus)
        parts = stages(job(software=to_all, system=mesh))
        assert parts.keys_s == pytest.approx(whole * sent_s)
