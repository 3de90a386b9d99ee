"""Why several machines are slower than one: stages side by side, and the host's collectives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from persia_sim.cluster.machine import System
from persia_sim.sharded.command import ShardedOptions, run_sharded
from persia_sim.sharded.plan import Strategy
from persia_sim.sharded.stages import collectives_s, host_s
from tests.persia_sim.test_gpu_sharded import BARE, HOST, job


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
