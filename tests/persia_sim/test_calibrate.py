"""`persia-sim calibrate`: a program's own steps, from a trace, become files that predict others.

No trace of a GPU was ever recorded here: those are written by hand, as Kineto's `output_json.cpp`
and torch's profiler write them. The CPU's are recorded.
"""

from __future__ import annotations

import gzip
import json
import sys
from math import exp, log
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim import __main__ as command
from persia_sim.base.files import MOST_DOCUMENT_BYTES
from persia_sim.presets.from_file import find_workload
from persia_sim.sharded.command import ShardedOptions, job_of
from persia_sim.sharded.plan import HostTime
from persia_sim.sharded.presets import find_software
from persia_sim.sharded.software import SOFTWARE, TRACED_LN, band_ln, strange
from persia_sim.sharded.stages import stages, step_s
from persia_sim.sharded.step_trace import read_steps

US = 1e-6


def span(kind: str, name: str, start: float, length: float, *, tid: int = 1, pid=7, **args):
    return {"ph": "X", "cat": kind, "name": name, "pid": pid, "tid": tid, "ts": start,
            "dur": length, "args": args}  # fmt: skip


def operator(name: str, start: float, length: float, dims=None, link: int = 0, tid: int = 1):
    args = {"External id": link} if link else {}
    return span("cpu_op", name, start, length, tid=tid,
                **args | ({} if dims is None else {"Input Dims": dims}))  # fmt: skip


def cpu_step(number: int, start: float) -> list[dict]:
    """1,000 us for five samples: a lookup of 100, a layer of 300 in whose call 10 are its own, its
    gradient of 200, an update of 50 that no sample is in, five operators of 1; the rest is the
    host's."""
    ops = [
        operator("aten::embedding_bag", start + 10, 100, [[50, 8], [15], [5], []]),
        operator("aten::linear", start + 200, 310, [[5, 8], [3, 8], [3]]),
        operator("aten::addmm", start + 205, 300, [[3], [5, 8], [8, 3], [], []]),
        operator("aten::mm", start + 600, 200, [[3, 5], [5, 8]], tid=2),
        operator("aten::add_", start + 900, 50, [[3, 8], [3, 8], []]),
    ]
    ops += [operator("aten::detach", start + 960 + 2 * k, 1, [[3]]) for k in range(5)]
    return [span("user_annotation", f"ProfilerStep#{number}", start, 1000), *ops]


def gpu_step(number: int, start: float, length: float = 1000) -> list[dict]:
    """Ten launches, 40 us from one to the next, of kernels of 20 us on a stream: three for tables,
    four products, two others and a copy; the host waits 500 us for the GPU at the end."""
    events = [span("user_annotation", f"ProfilerStep#{number}", start, length)]
    ops = ["aten::embedding_bag"] * 3 + ["aten::addmm"] * 4 + ["aten::relu"] * 2 + [""]
    dims = {
        "aten::embedding_bag": [[10**6, 64], [2048], [2048], []],
        "aten::addmm": [[128], [2048, 512], [512, 128], [], []],
    }
    for k, name in enumerate(ops):
        at = start + 10 + 40 * k
        call = "cudaLaunchKernel" if name else "cudaMemcpyAsync"
        link = 100 * number + k + 1
        if name:
            events.append(operator(name, at - 5, 15, dims.get(name, [[2048, 128]]), link))
        events.append(span("cuda_runtime", call, at, 4, correlation=link))
        kind = "kernel" if name else "gpu_memcpy"
        events.append(
            span(
                kind,
                "ampere_x" if name else "Memcpy HtoD (Pinned -> Device)",
                at + 6,
                20,
                pid=0,
                tid=9,
                **{"External id": link, "device": 0, "stream": 9},
            )
        )
    return [*events, span("cuda_runtime", "cudaDeviceSynchronize", start + 450, 500)]


def trace(path: Path, step, starts=(0, 1000, 2000, 3000), **changes) -> Path:
    events = [{"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}}]
    for number, start in enumerate(starts):
        events += step(number + 2, start)
    document = {"schemaVersion": 1, "traceEvents": events} | changes
    text = json.dumps(document).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def said(monkeypatch, capsys, *words: object) -> str:
    monkeypatch.setattr(sys, "argv", ["persia-sim", *map(str, words)])
    status, told = command.main(), capsys.readouterr()
    assert status == 0, told.err
    return told.out


def refused(monkeypatch, capsys, *words: object) -> str:
    monkeypatch.setattr(sys, "argv", ["persia-sim", *map(str, words)])
    status, told = command.main(), capsys.readouterr()
    assert status == 2 and told.out == "" and told.err.count("\n") == 1, told.err
    return told.err


def test_steps_of_a_cpu_have_the_times_that_were_written(tmp_path):
    found = read_steps(trace(tmp_path / "a.json.gz", cpu_step))
    assert len(found.durations_s) == 3, "the first of four may be slower"
    assert found.step_s == pytest.approx(1000 * US) and not found.on_gpu
    assert (found.kernels, found.table_kernels, found.launch_s) == (10, 1, 1 * US)
    work = {kind: s / US for kind, s in found.work_s.items() if s > 1e-12}
    assert work == pytest.approx({"tables": 99, "products": 299 + 199 + 9, "constant": 49})
    assert found.host_s == pytest.approx((1000 - 99 - 507 - 49) * US)
    assert found.batch == 5 and found.layers == ((8, 3),) and found.lookups == ((50, 8, 15, True),)
    assert found.multiplications == 2 * 5 * 8 * 3
    chosen = read_steps(tmp_path / "a.json.gz", (2, 3))
    assert len(chosen.durations_s) == 2


def test_steps_of_a_gpu_have_the_times_that_were_written(tmp_path):
    found = read_steps(trace(tmp_path / "a.json", gpu_step))
    assert found.on_gpu and (found.kernels, found.table_kernels) == (10, 3)
    assert found.launch_s == pytest.approx(40 * US)
    assert found.host_s == pytest.approx(500 * US) and found.busy_s == pytest.approx(200 * US)
    work = {kind: s / US for kind, s in found.work_s.items() if s}
    assert work == pytest.approx({"tables": 60, "products": 80, "others": 40, "copies": 20})


def test_kernels_of_a_graph_are_one_launch(tmp_path):
    def step(number: int, start: float) -> list[dict]:
        calls = [event for event in gpu_step(number, start) if event["name"] != "cudaLaunchKernel"]
        return [*calls, span("cuda_runtime", "cudaGraphLaunch", start + 5, 9)]

    found = read_steps(trace(tmp_path / "a.json", step))
    assert (found.kernels, found.table_kernels) == (2, 2), "a graph and a copy"
    assert found.busy_s == pytest.approx(200 * US)


def test_what_ranks_wait_for_each_other_is_in_steps_of_as_many(tmp_path, monkeypatch, capsys):
    """Two ranks: an all-reduce in another thread is no work, and the band is of two ranks."""

    def step(number: int, start: float) -> list[dict]:
        summed = operator("gloo:all_reduce", start + 300, 400, tid=5)
        return [*cpu_step(number, start), summed]

    path = trace(tmp_path / "two.json", step, distributedInfo={"backend": "gloo", "world_size": 2})
    found = read_steps(path)
    assert found.ranks == 2 and found.work_s["exchanges"] == pytest.approx(399 * US)
    assert found.busy_s == pytest.approx((99 + 507 + 49) * US)
    out = tmp_path / "out"
    said(monkeypatch, capsys, "calibrate", "--trace", path, "--out", out)
    files = {"software": "software", "model": "workload", "system": "system"}
    asked = {key: str(out / f"{file}.toml") for key, file in files.items()}
    two, four = (job_of(ShardedOptions(**asked, gpus=gpus)) for gpus in (2, 4))
    assert step_s(two) == pytest.approx(1000 * US, rel=0.01)
    assert strange(two) == {} and set(strange(four)) == {"nodes"}


@pytest.mark.parametrize(
    ("length", "rule"), [(500, HostTime.HIDDEN), (540, HostTime.PARTLY), (700, HostTime.EXPOSED)]
)
def test_the_law_of_launching_is_the_one_that_the_steps_follow(
    length, rule, tmp_path, monkeypatch, capsys
):
    """Of a GPU at work for 200 us and a host for 500."""

    def step(number: int, start: float) -> list[dict]:
        events = gpu_step(number, start, length)
        events[-1] |= {"ts": start + 450, "dur": length - 500}
        return events

    starts = [length * k for k in range(4)]
    path = trace(tmp_path / "mine.json", step, starts)
    said(monkeypatch, capsys, "calibrate", "--trace", path, "--system", "dgx-a100", "--out",
         tmp_path / "out")  # fmt: skip
    found = find_software(str(tmp_path / "out" / "software.toml"))
    assert found.host_time is rule
    files = {"software": "software", "model": "workload"}
    asked = {key: str(tmp_path / "out" / f"{file}.toml") for key, file in files.items()}
    job = job_of(ShardedOptions(**asked, system="dgx-a100", gpus=1))
    assert stages(job).host_s == pytest.approx(500 * US)
    assert step_s(job) == pytest.approx(length * US, rel=0.15)
    assert found.traced.spread >= abs(log(step_s(job) / (length * US))) * 0.999


def test_what_is_written_gives_the_steps_back_and_has_no_name_of_a_framework(
    tmp_path, monkeypatch, capsys
):
    path = trace(tmp_path / "step.json.gz", cpu_step)
    out = tmp_path / "files"
    told = said(monkeypatch, capsys, "calibrate", "--trace", path, "--out", out)
    assert "1.000 ms" in told and f"--software {out}/software.toml" in told
    files = {name: out / f"{name}.toml" for name in ("software", "workload", "system")}
    for file in files.values():
        words = file.read_text().lower()
        assert not any(name in words for name in ("torch", *SOFTWARE)), file
    work = find_workload(str(files["workload"]))
    assert (work.batch_per_rank, work.mlp, work.weights) == (5, (3,), 27)
    (table,) = work.tables
    assert (table.rows, table.dim, table.ids_per_sample) == (50, 8, (3.0,))
    options = {"model": str(files["workload"]), "system": str(files["system"])}
    asked = ShardedOptions(**options, software=str(files["software"]), gpus=1)
    assert step_s(job_of(asked)) == pytest.approx(1000 * US, rel=1e-3)
    # Twice the samples: what samples are in takes twice as long, the rest as long as before.
    twice = step_s(
        job_of(ShardedOptions(**options, software=asked.software, gpus=1, batch_per_gpu=10))
    )
    assert twice == pytest.approx((1000 + 99 + 507) * US, rel=1e-3)
    screen = said(monkeypatch, capsys, "sharded", "--gpus", 1, "--software", files["software"],
                  "--model", files["workload"], "--system", files["system"])  # fmt: skip
    assert "1.000 ms" in screen and "borrowed" not in screen


def test_its_band_is_the_spread_of_its_steps_and_never_less_than_what_was_found(
    tmp_path, monkeypatch, capsys
):
    bands = []
    for name, factor in (("even", 1.0), ("uneven", 2.0)):

        def step(number: int, start: float, factor: float = factor) -> list[dict]:
            events = cpu_step(number, start)
            events[0]["dur"] = 1000 * (factor if number % 2 else 1.0)
            return events

        path = trace(tmp_path / f"{name}.json", step, [2000 * k for k in range(9)])
        said(monkeypatch, capsys, "calibrate", "--trace", path, "--out", tmp_path / name)
        files = {"software": "software", "model": "workload", "system": "system"}
        asked = {key: str(tmp_path / name / f"{file}.toml") for key, file in files.items()}
        job = job_of(ShardedOptions(**asked, gpus=1))
        bands.append(band_ln(job))
        assert strange(job) == {}
        far = {
            "model": {"batch_per_gpu": 4096}, "nodes": {"gpus": 2},
            "machine": {"system": "dgx-a100"},
        }  # fmt: skip
        for what, change in far.items():
            other = job_of(ShardedOptions(**{**asked, "gpus": 1, **change}))
            assert what in strange(other) and band_ln(other) > bands[-1]
    assert bands[0] == pytest.approx(1.645 * TRACED_LN, rel=0.1)
    assert bands[1] > 1.645 * 0.3 > bands[0]


@pytest.mark.long
def test_every_command_that_takes_the_name_of_a_software_takes_the_file(
    tmp_path, monkeypatch, capsys
):
    path = trace(tmp_path / "mine.json", gpu_step)
    out = tmp_path / "out"
    said(
        monkeypatch, capsys, "calibrate", "--trace", path, "--system", "a2-highgpu-8g", "--out", out
    )
    file = out / "software.toml"
    small = ["--steps", 20, "--workload", "criteo-ad", "--ranks", 8]
    plain = said(monkeypatch, capsys, *small)
    mine = said(monkeypatch, capsys, *small, "--software", file, "--compare", "sharded")
    assert "`persia-sim sharded --software mine`" in mine and "launching as torch's" not in mine
    assert plain != mine
    sized = said(monkeypatch, capsys, "size", "--at-least", 5e5, "--workload", "criteo-ad",
                 "--software", file, "--machines", "a2-highgpu-8g", "c2-standard-30",
                 "m2-ultramem-416")  # fmt: skip
    assert "mine" in sized and "hybrid" in sized
    slow = file.read_text().replace("host_s = ", "host_s = 0.05 #")
    file.write_text(slow)
    slower = said(monkeypatch, capsys, *small, "--software", file)
    assert _rate(slower) < _rate(said(monkeypatch, capsys, *small)), "hybrid's dense stage takes it"


def _rate(screen: str) -> float:
    (line,) = [line for line in screen.splitlines() if "  throughput  " in line]
    number, unit = line.split()[1:3]
    return float(number) * {"k": 1e3, "M": 1e6}.get(unit[0], 1.0)


def test_a_recorded_program_is_predicted_at_another_batch(tmp_path, monkeypatch, capsys):
    """A real trace of torch's profiler, of two tables and two layers: its model is read, its steps
    come back, and of a third of the samples less than the whole step is predicted."""
    import torch

    bags = torch.nn.ModuleList(torch.nn.EmbeddingBag(500, 16, mode="sum") for _ in range(2))
    top = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD([*bags.parameters(), *top.parameters()], lr=0.1)
    ids = torch.randint(500, (2, 96, 3), generator=torch.Generator().manual_seed(0))
    path = tmp_path / "tiny.json"
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        record_shapes=True,
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=4),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(6):
            optimizer.zero_grad()
            pooled = torch.cat([bag(each) for bag, each in zip(bags, ids, strict=True)], 1)
            top(pooled).square().mean().backward()
            optimizer.step()
            profiler.step()
    steps = read_steps(path)
    assert len(steps.durations_s) == 3 and steps.batch == 96
    assert steps.layers == ((32, 64), (64, 1))
    assert steps.lookups == ((500, 16, 288, True),) * 2
    # Two passes of each layer's product and its input's gradient; none of the ids'.
    assert steps.multiplications == 96 * (3 * 32 * 64 + 3 * 64)
    out = tmp_path / "out"
    said(monkeypatch, capsys, "calibrate", "--trace", path, "--out", out)
    asked = {"software": "software", "model": "workload", "system": "system"}
    asked = {key: str(out / f"{file}.toml") for key, file in asked.items()}
    whole, third = (
        step_s(job_of(ShardedOptions(**asked, gpus=1, batch_per_gpu=b))) for b in (96, 32)
    )
    assert whole == pytest.approx(steps.step_s, rel=0.02)
    assert steps.host_s < third < whole


BAD = {
    "no JSON": (b"{", "not well-formed JSON"),
    "no trace": (b'{"a": 1}', "no list traceEvents"),
    "no list": (b'{"traceEvents": {}}', "no list traceEvents"),
    "no table": (b"[3]", "traceEvents[0] must be a table, got 3"),
    "no step": (b"[]", "no step is marked in it"),
    "no time": (b'[{"ph": "X", "ts": "1", "dur": 2}]', "traceEvents[0].ts must be a number"),
    "no length": (b'[{"ph": "X", "ts": 1}]', "traceEvents[0].dur must be a number"),
    "NaN": (b'[{"ph": "X", "ts": NaN, "dur": 2}]', "NaN is not a finite number"),
    "endless": (b'[{"ph": "X", "ts": 1e999, "dur": 2}]', "ts must be a number of at most 1e+18"),
    "huge": (b'[{"ph": "X", "ts": 1, "dur": 1e300}]', "dur must be a number of at most 1e+18"),
    "digits": (b'[{"ph": "X", "ts": ' + b"9" * 9000 + b', "dur": 2}]', "not well-formed JSON"),
    "ranks": (b'{"traceEvents": [], "distributedInfo": {"world_size": -3}}', "world_size is -3"),
    "backwards": (b'[{"ph": "X", "ts": 1, "dur": -2}]', "traceEvents[0].dur is -2"),
    "a name": (b'[{"ph": "X", "ts": 1, "dur": 2, "name": [1]}]', "name must be text"),
    "arguments": (b'[{"ph": "X", "ts": 1, "dur": 2, "args": 5}]', "args must be a table"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "damaged": (gzip.compress(b"[]" * 99)[:-9], "is damaged"),
    "packed": (b"\x1f\x8bnonsense", "is damaged"),
    "bytes": (b"\xff\xfe\x00", "not text in UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_strangers_trace_is_a_sentence_and_no_traceback(name, tmp_path, monkeypatch, capsys):
    content, expected = BAD[name]
    (path := tmp_path / "step.json").write_bytes(content)
    told = refused(monkeypatch, capsys, "calibrate", "--trace", path, "--out", tmp_path / "out")
    assert "step.json" in told and expected in told and not (tmp_path / "out").exists()


def test_a_trace_that_unpacks_beyond_bounds_is_not_unpacked(tmp_path, monkeypatch, capsys):
    (path := tmp_path / "a.json.gz").write_bytes(gzip.compress(b" " * (MOST_DOCUMENT_BYTES + 2)))
    assert "unpacks to more than" in refused(monkeypatch, capsys, "calibrate", "--trace", path)


def changed(**changes):
    """A trace of a CPU whose second operator has other arguments."""

    def step(number: int, start: float) -> list[dict]:
        events = cpu_step(number, start)
        events[1] = events[1] | {"args": changes}
        return events

    return step


def test_what_a_trace_does_not_say_is_asked_for(tmp_path, monkeypatch, capsys):
    shapeless = trace(tmp_path / "a.json", lambda n, at: [
        {**event, "args": {}} for event in cpu_step(n, at)])  # fmt: skip
    words = ["calibrate", "--out", tmp_path / "out", "--trace"]
    assert "record_shapes=True, or name the model" in refused(
        monkeypatch, capsys, *words, shapeless
    )
    assert "--batch" in refused(monkeypatch, capsys, *words, shapeless, "--model", "dlrm")
    said(monkeypatch, capsys, *words, shapeless, "--model", "dlrm", "--batch", 5)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"software.toml", "system.toml"}
    assert "is there already" in refused(
        monkeypatch, capsys, *words, shapeless, "--model", "dlrm", "--batch", 5
    )
    gpu = trace(tmp_path / "gpu.json", gpu_step)
    assert "--system" in refused(monkeypatch, capsys, *words, gpu)
    cpu = trace(tmp_path / "cpu.json", cpu_step)
    assert "leave it out" in refused(monkeypatch, capsys, *words, cpu, "--system", "dgx-a100")
    assert "--steps is 7 9" in refused(monkeypatch, capsys, *words, cpu, "--steps", 7, 9)
    wrong = trace(tmp_path / "b.json", changed(**{"Input Dims": [[50, -8], [12]]}))
    assert "Input Dims of 'aten::embedding_bag' must hold sizes" in refused(
        monkeypatch, capsys, *words, wrong
    )

    def two_gpus(number: int, start: float) -> list[dict]:
        return [*gpu_step(number, start), span("kernel", "k", start + 5, 9, pid=1, device=1)]

    assert "GPUs in it is 2" in refused(
        monkeypatch, capsys, *words, trace(tmp_path / "c.json", two_gpus)
    )
    no_calls = trace(tmp_path / "d.json", lambda n, at: [
        event for event in gpu_step(n, at) if event["cat"] != "cuda_runtime"])  # fmt: skip
    assert "activities CPU and CUDA" in refused(monkeypatch, capsys, *words, no_calls)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_value_in_any_place_is_read_or_refused(tmp_path_factory, data):
    """One key of one event of a good trace has another value."""
    step = data.draw(st.sampled_from([cpu_step, gpu_step]))
    events = [event for number in range(3) for event in step(number, 1000.0 * number)]
    event = data.draw(st.sampled_from(events))
    within = data.draw(st.sampled_from([event, event["args"]]))
    key = data.draw(st.sampled_from([*within, "Input Dims", "device", "ph"]))
    within[key] = data.draw(JUNK)
    path = tmp_path_factory.mktemp("junk") / "step.json"
    path.write_text(json.dumps({"traceEvents": events}))
    try:
        found = read_steps(path)
    except ValueError as error:
        assert "step.json" in str(error)
    else:
        assert found.step_s > 0 and found.host_s >= 0 and exp(found.spread_ln) >= 1
