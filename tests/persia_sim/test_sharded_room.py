"""Tables on the GPUs: what has room, what is refused, and how sure an answer is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_sim.cluster.machine import Precision, System
from persia_sim.cluster.tables import RowUpdate, Table
from persia_sim.presets.catalogue import MACHINES
from persia_sim.presets.fitted import FITTED, REACH, holders
from persia_sim.sharded.command import ShardedOptions, job_of, run_sharded
from persia_sim.sharded.compare import fitting_gpus
from persia_sim.sharded.plan import Strategy, make_plan
from persia_sim.sharded.software import (
    BAND,
    SEEN,
    SOFTWARE,
    Seen,
    band_ln,
    constants_ln,
    half_ln,
    strange,
)
from persia_sim.sharded.stages import Job, fits
from tests.persia_sim.test_gpu_sharded import FOUR, HOST, RANKERS, job


def test_the_fullest_gpu_decides_whether_the_rows_have_room():
    """Beside rows: 2 GB of workspace, 18 bytes of each of 1e6 weights, 1,000 samples of 40 pooled
    numbers and 4,000 of the layers, and the pooled ones and their gradients to send."""
    beside = 2e9 + 18e6 + 1000 * 2 * (40 + 4000) + 1000 * 2 * 2 * 40
    assert job().beside_rows_bytes == pytest.approx(beside)
    room = 10e9 - beside
    for update, state in ((RowUpdate.SGD, 1), (RowUpdate.ADAGRAD, 2), (RowUpdate.LAZY_ADAM, 3)):
        for share, has_room in ((0.999, True), (1.001, False)):
            rows = share * room / 40 / state
            table = Table(rows=rows, dim=10)  # on one GPU of four: the sum has room
            # The other tables give as many numbers as before, and lie elsewhere.
            ranker = replace(FOUR, tables=(table, Table(rows=1000, dim=10, count=3)), update=update)
            assert fits(job(ranker=ranker)) is has_room, (update, share)


def test_optimiser_state_is_part_of_what_every_plan_holds():
    for update, state in ((RowUpdate.SGD, 1), (RowUpdate.ADAGRAD, 2), (RowUpdate.DENSE_ADAM, 3)):
        ranker = replace(FOUR, update=update)
        for strategy in (Strategy.TABLE, Strategy.ROW, Strategy.COLUMN, Strategy.PLANNED):
            plan = make_plan(ranker, 4, strategy)
            assert plan.sharded.bytes.tolist() == [state * 4 * 1000 * 10] * 4, strategy
        copies = make_plan(ranker, 4, Strategy.DATA_PARALLEL)
        assert copies.bytes == copies.replicated_bytes == state * 4 * 4000 * 10


def test_tables_are_dealt_by_memory_where_cost_would_overflow_a_gpu():
    """Two hot tables of 1 GB cost most; by cost two of the four cold ones of 6 GB meet."""
    hot = Table(rows=25e6, dim=10, ids_per_sample=(50.0,), count=2)
    cold = Table(rows=150e6, dim=10, ids_per_sample=(1.0,), count=4)
    ranker = replace(FOUR, tables=(hot, cold))
    by_cost = make_plan(ranker, 4, Strategy.TABLE)
    assert by_cost.sharded.bytes.max() == pytest.approx(12e9)
    roomy = make_plan(ranker, 4, Strategy.TABLE, room_bytes=8e9)
    assert sorted(roomy.sharded.bytes) == pytest.approx([6e9, 6e9, 7e9, 7e9])
    assert roomy.sharded.ids.sum() == by_cost.sharded.ids.sum()
    hopeless = make_plan(ranker, 4, Strategy.TABLE, room_bytes=5e9)  # as if they had room
    assert hopeless.sharded.bytes.tolist() == by_cost.sharded.bytes.tolist()
    assert fits(job(ranker=ranker)), "a job's own plan knows its room"


@given(RANKERS, st.integers(1, 9), st.floats(0.1, 3.0))
def test_a_plan_with_little_room_holds_the_same_rows_and_is_never_fuller(ranker, gpus, share):
    free = make_plan(ranker, gpus, Strategy.TABLE)
    room = share * ranker.table_bytes / gpus
    tight = make_plan(ranker, gpus, Strategy.TABLE, room_bytes=room)
    for field in ("ids", "elements", "sent", "bytes"):
        own = getattr(tight.sharded, field)
        assert own.sum() == pytest.approx(getattr(free.sharded, field).sum())
    assert tight.bytes <= free.bytes


def test_a_system_of_several_nodes_needs_nics():
    with pytest.raises(ValueError, match="gpus is 8: a round has 4 and no NIC is described"):
        System(host=replace(HOST, nic_bytes_per_s=0.0), gpus=8)


def test_every_fitted_constant_is_where_its_owner_has_it():
    """A constant of one system stands behind that of its kind."""
    held: dict[tuple[str, str], float] = {}
    for name, constant in FITTED.items():
        owner, _, field = name.rpartition(".")
        for holder in [owner] if owner == "reach" else holders(owner):
            held[holder, field] = constant.value
        assert constant.width > 0 and 0 < constant.spread <= 1.01 * constant.width
        assert not constant.is_share or constant.value <= 1
    for (holder, field), value in held.items():
        found = REACH if holder == "reach" else SOFTWARE[holder]
        assert getattr(found, field) == value, (holder, field)


def test_a_system_says_its_releases_and_has_measured_steps():
    assert SOFTWARE.keys() == SEEN.keys()
    for name, soft in SOFTWARE.items():
        assert soft.name == name and soft.versions and soft.source and not soft.unmeasured


def usual(**changes: object) -> Job:
    """DLRM by TorchRec on one node, as it was measured."""
    tables = (Table(rows=1000, dim=10, count=26),)
    host = replace(MACHINES["dgx-a100"], gpus=4)
    ranker = replace(FOUR, tables=tables, dense_macs=2.5e6)
    base = job(software=SOFTWARE["torchrec"], ranker=ranker, system=System(host=host, gpus=4))
    return replace(base, reach=REACH, **changes)


STRANGE = {
    "nothing": ({}, ()),
    "a model twice as large": ({"ranker": {"dense_macs": 4.9e6}}, ()),
    "a larger model": ({"ranker": {"dense_macs": 5.1e6}}, ("model",)),
    "another software": ({"software": {"name": "mine"}}, ("software",)),
    "copies": ({"software": {"strategy": Strategy.DATA_PARALLEL}}, ("software",)),
    "another machine": ({"host": MACHINES["g6.48xlarge"]}, ("machine",)),
    "several nodes": ({"gpus": 8}, ("nodes",)),
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_a_band_is_wider_for_all_that_nobody_measured(name):
    changes, expected = STRANGE[name]
    known, asked = usual(), usual()
    for part in ("ranker", "software"):
        asked = replace(asked, **{part: replace(getattr(asked, part), **changes.get(part, {}))})
    host = changes.get("host", asked.system.host)
    asked = replace(asked, system=System(host=host, gpus=changes.get("gpus", 4)))
    assert tuple(strange(asked)) == expected and strange(known) == {}
    for what, said in strange(asked).items():
        assert getattr(BAND, what) > 0 and said
    spreads = {n: constant.spread for n, constant in FITTED.items()}
    assert band_ln(asked) == half_ln(constants_ln(asked, spreads), expected)
    base = half_ln(constants_ln(asked, spreads), ())
    assert band_ln(asked) > base if expected else band_ln(asked) == base


def test_a_band_holds_what_the_constants_leave_open():
    """Where the host is all of a step, its spread is the step's: hand in hand with the rest."""
    asked = usual(batch=4)
    none = dict.fromkeys(FITTED, 0.0)
    assert constants_ln(asked, none) == 0
    slow = replace(asked, software=replace(asked.software, host_exchange_s=1.0))
    spread = constants_ln(slow, none | {"torchrec.host_exchange_s": 0.2})
    assert spread == pytest.approx(0.2, rel=0.03)
    both = none | {"torchrec.host_exchange_s": 0.2, "reach.hbm": 0.1}
    quick = usual(batch=10**8)
    parts = [constants_ln(quick, none | {n: both[n]}) for n in both if both[n]]
    assert constants_ln(quick, both) == pytest.approx(np.hypot(*parts))
    # Of a normal law with this spread a band of 90 % leaves 5 % on either side.
    assert half_ln(0.3, (), replace(BAND, known=0.4)) == pytest.approx(1.645 * 0.5)


def test_what_was_seen_decides_what_is_strange():
    job_ = usual()
    seen = {"torchrec": Seen(((2.5e6, 26.0),), 1)}
    assert strange(job_, seen, {"A100"}) == {} and set(strange(job_, {}, {"A100"})) == {"software"}
    assert set(strange(job_, seen, set())) == {"machine"}
    lone = replace(job_, system=System(host=job_.system.host, gpus=1))
    assert strange(lone, seen, set()) == {}, "one GPU needs no links"


def test_rows_without_room_are_refused_with_the_fewest_machines_that_have_it():
    small = ShardedOptions(model="criteo-syn1", system="p5.48xlarge", gpus=8)
    said = r"--gpus is 8: 3,\d+\.\d GB of rows and \d+\.\d GB beside them .* GPUs with 80; the plan"
    with pytest.raises(ValueError, match=said):
        run_sharded(small)
    enough = fitting_gpus(job_of(small))
    assert enough is not None and f"use --gpus {enough}," in str(error_of(small))
    assert fits(job_of(replace(small, gpus=enough)))
    assert not fits(job_of(replace(small, gpus=enough - 8)))
    assert "THEY DO NOT FIT" in run_sharded(replace(small, anyway=True))


def test_a_plan_of_which_only_the_sum_fits_is_refused_with_what_the_fullest_needs():
    """A part of 15 GB too many on one of 128 GPUs of 80, while the sum has room."""
    kwai = ShardedOptions(model="kwai-video", system="p5.48xlarge", gpus=128, batch_per_gpu=2048,
                          precision=Precision.FP16)  # fmt: skip
    job = job_of(kwai)
    together = float(job.plan.sharded.bytes.sum())
    assert together + 128 * job.beside_rows_bytes <= 128 * 80e9
    assert "--gpus is 128: 90.9 GB of rows and 2.7 GB beside them" in str(error_of(kwai))


def error_of(options: ShardedOptions) -> ValueError:
    with pytest.raises(ValueError) as caught:
        run_sharded(options)
    return caught.value


def test_rows_in_the_hosts_memory_need_room_there_and_none_in_hbm(tmp_path):
    """A row of 128 floats: 128 GB on GPUs of 80, ten tables of 190 GB in hosts of 2,199."""
    path = tmp_path / "model.toml"
    tables = """dense_macs = 1e6\ndense_params = 1e6
        [[tables]]\nrows = {hbm}\ndim = 128
        [[tables]]\nrows = {uvm}\ndim = 128\ncount = 10\nstorage = "uvm"\n"""
    options = ShardedOptions(model=str(path), system="dgx-h100", gpus=1)
    path.write_text(tables.format(hbm=250e6, uvm=371e6))
    assert "use --gpus 8," in str(error_of(options)), "whole machines; two GPUs fit"
    assert f"{10 * 371e6 * 512 / 1e9:,.1f} GB of a machine's 2,199" in (
        run_sharded(replace(options, gpus=2))
    )
    path.write_text(tables.format(hbm=1e6, uvm=5 * 371e6))
    assert "use --gpus 40," in str(error_of(options)), "9.5 TB fill four machines and a half"
    assert job_of(options).host_rows_bytes == job_of(replace(options, gpus=8)).host_rows_bytes
    assert job_of(replace(options, gpus=12)).host_rows_bytes == pytest.approx(
        50 * 371e6 * 512 * 8 / 12
    )


def test_rows_that_no_number_of_machines_holds_are_told_so():
    lonely = replace(MACHINES["p5.48xlarge"], nic_bytes_per_s=0.0)
    job = job_of(ShardedOptions(model="criteo-syn1", system="p5.48xlarge", gpus=8))
    assert fitting_gpus(replace(job, system=System(host=lonely, gpus=8))) is None
