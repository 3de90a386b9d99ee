"""What only a GPU can say: it trains as the CPU does, in every mode, precision and connection.

What a device does with streams is tested without one in test_staging.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from persia_sim.base.vocabulary import Mode
from persia_sim.presets.profile import read_profile
from runtime.checkpoint.places import complete_checkpoints
from runtime.checkpoint.whole import read_checkpoint
from runtime.run.session import Saving, train
from tests.runtime.worlds import ArraySource, changed, config, difference, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SOURCE = ArraySource(200)
MODES = {
    "sync": {"mode": Mode.SYNC},
    "lookahead": {"mode": Mode.LOOKAHEAD, "ahead": 3},
    "raw_hybrid": {"mode": Mode.RAW_HYBRID, "tau": 2},
    "hybrid": {"mode": Mode.HYBRID, "tau": 2},
    "async": {"mode": Mode.ASYNC, "tau": 1},
    "async_averaging": {"mode": Mode.ASYNC_AVERAGING, "tau": 1},
}
"""In the executor constant_lag an order of its own each, so that both devices train the same."""
SAME_ORDER = {"sync", "lookahead"}
"""Modes whose bytes do not depend on time in the concurrent executor, either."""
CLOSE = {"float32": 1e-4, "float64": 1e-10}


def settings_of(name: str, executor: str, dtype: str = "float32"):
    more = dict(MODES[name])
    if name == "async_averaging":
        more |= {"average_every_steps": 2} if executor == "constant_lag" else {}
    if executor == "concurrent" and name not in SAME_ORDER:
        more |= {"ranks": 1} if name.startswith("async") else {}
        more["tau"] = 0
    return config(**{"ranks": 2, "executor": executor, "dtype": dtype, **more})


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("executor", ["constant_lag", "concurrent"])
@pytest.mark.parametrize("name", MODES)
def test_every_mode_trains_on_the_gpu_as_on_the_cpu(name, executor, dtype):
    settings = settings_of(name, executor, dtype)
    there = run(changed(settings, device="cuda"), SOURCE)
    assert difference(run(settings, SOURCE), there)[1] < CLOSE[dtype]


@pytest.mark.parametrize("name", ["hybrid", "async"])
def test_late_rows_in_threads_stay_finite_and_train_everything(name):
    world = run(config(ranks=3, executor="concurrent", device="cuda", **MODES[name]), SOURCE)
    assert all(np.isfinite(array).all() for array in world.state().values())


def test_a_recorded_order_is_carried_out_as_on_the_cpu():
    recorded = run(config(ranks=2, executor="concurrent", device="cuda", **MODES["hybrid"]), SOURCE)
    again = run(config(ranks=2, **MODES["hybrid"]), SOURCE, order=recorded.trace)
    assert difference(recorded, again)[1] < CLOSE["float32"]


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_short_precisions_stay_near_float32(precision):
    """The mean over five seeds: a draw of one alone was above a tenth in two of twelve cases."""
    gaps = []
    for seed in range(5):
        plain = run(config(executor="concurrent", device="cuda", seed=seed), SOURCE)
        short = run(
            config(executor="concurrent", device="cuda", seed=seed, precision=precision), SOURCE
        )
        assert all(np.isfinite(array).all() for array in short.state().values())
        gaps.append(difference(plain, short)[1])
    assert np.mean(gaps) < 0.15


def test_tf32_rounds_products_of_the_gpu_and_leaves_those_of_the_cpu():
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=draw) for _ in range(2))
    run(config(device="cuda", precision="tf32", steps=1), SOURCE)
    rounded, here = (left.cuda() @ right.cuda()).cpu(), left @ right
    run(config(device="cuda", steps=1), SOURCE)
    exact = (left.cuda() @ right.cuda()).cpu()
    assert (rounded - exact).abs().max() > 1e-3 > (here - exact).abs().max()


@pytest.mark.parametrize("to", ["cuda", "cpu"])
def test_a_run_goes_on_from_its_checkpoint_on_either_device(tmp_path, to):
    whole = config(
        ranks=2,
        executor="constant_lag",
        device="cuda",
        checkpoint_every=4,
        keep_checkpoints=100,
        tau=2,
        mode=Mode.HYBRID,
    )
    first = train(whole, SOURCE, saving=Saving(tmp_path / "a"))
    cut = read_checkpoint(complete_checkpoints(tmp_path / "a")[0])
    again = train(changed(whole, device=to), SOURCE, saving=Saving(tmp_path / "b", cut))
    for name, tensor in first.model.state_dict().items():
        there = again.model.state_dict()[name].cpu()
        assert torch.allclose(tensor.cpu(), there, rtol=CLOSE["float32"], atol=1e-6), name


def test_the_generator_of_the_device_is_kept_and_restored(tmp_path):
    settings = config(device="cuda", checkpoint_every=4, keep_checkpoints=100)
    torch.cuda.manual_seed(5)
    train(settings, SOURCE, saving=Saving(tmp_path / "a"))
    kept = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(6)
    cut = read_checkpoint(complete_checkpoints(tmp_path / "a")[0])
    train(settings, SOURCE, saving=Saving(tmp_path / "b", cut))
    assert torch.equal(torch.cuda.get_rng_state(), kept)


WORDS = ["--data.name", "synthetic", "--steps", "20", "--batch", "64", "--test-rows", "500",
         "--checkpoint-every", "end"]  # fmt: skip


def command(*words: str, **environment: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True, text=True, env=os.environ | environment,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-1500:] + found.stderr[-3000:]


def auc(folder) -> float:
    summary = json.loads((folder / "summary.json").read_text())
    return float(next(iter(summary["tasks"].values()))["auc"])


@pytest.fixture(scope="module")
def auc_of_the_cpu(tmp_path_factory) -> float:
    out = tmp_path_factory.mktemp("cpu") / "run"
    command("runtime", "train", *WORDS, "--out", str(out))
    return auc(out)


@pytest.mark.multiproc
def test_a_model_of_the_gpu_is_evaluated_on_the_cpu(tmp_path):
    run_folder = tmp_path / "run"
    command("runtime", "train", *WORDS, "--device", "cuda", "--precision", "tf32",
            "--out", str(run_folder))  # fmt: skip
    scores = tmp_path / "scores.json"
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    command("runtime", "evaluate", str(run_folder), "--out", str(scores), **hidden)
    assert scores.exists()


@pytest.mark.multiproc
def test_stage_times_of_the_gpu_are_a_profile(tmp_path):
    words = ["--dim", "4", "--hidden", "8", "--data", "synthetic:criteo-ad:0.0001"]
    out = tmp_path / "profile.json"
    command("runtime", "profile", "--no-processes", "--device", "cuda", *words, "--out", str(out))
    found = read_profile(out)
    assert {"copy_in", "copy_out"} <= set(found.laws) and found.copies.startswith("measured")
    assert found.gpu.device == torch.cuda.get_device_name()


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("device", "ranks", "more"),
    [
        ("cuda", 1, []),  # NCCL
        ("cuda:0", 2, []),  # gloo: two ranks share one device
        ("cuda:0", 2, ["--mode", "async"]),  # dense gradients come from the wire
        ("cuda:0", 2, ["--mode", "async_averaging"]),
    ],
)
def test_ranks_that_are_processes_train_on_the_gpu(tmp_path, auc_of_the_cpu, device, ranks, more):
    """As sync on the CPU, nearly: 20 steps are too few for lateness to show."""
    # A host need not know its own name: then torchrun would wait for itself for ever.
    launch = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    launch += [f"--nproc-per-node={ranks}", "-m"]
    out = tmp_path / "run"
    command(*launch, "runtime", "train", *WORDS, "--device", device, *more, "--out", str(out))
    assert auc(out) == pytest.approx(auc_of_the_cpu, abs=0.1)
