"""Reads what nobody has written of runs, one file after another, from a seed.

    python -m tests.runtime.fuzz_runs SEED FIRST COUNT

Each is read or ends as a ValueError of one line, or this process ends: with another error, by a
signal, past its limit of memory, or of time for one input. The last line on stdout says which input
it was; ``SEED NUMBER 1`` is that one alone.
"""

from __future__ import annotations

import io
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from persia_sim.base.files import read_document
from persia_sim.base.schema import parse
from persia_sim.base.trace import Trace
from runtime.checkpoint.places import DENSE, ROWS, STATE, TRACE, TRAINED
from runtime.checkpoint.rows import load
from runtime.checkpoint.shard import MANIFEST
from runtime.checkpoint.sketches import read_sketches, write_sketches
from runtime.checkpoint.whole import read_checkpoint
from runtime.config import read_config
from runtime.data.batch import Batch, Field, Layout
from runtime.data.errors import matching
from runtime.data.fingerprints import NO_ROWS
from runtime.data.open import PartWriter, cached_chunks
from runtime.data.schema import read_schema
from runtime.data.source import Provenance
from runtime.files import digest_of, read_arrays, read_dense, write_arrays, write_sealed
from runtime.run.folder import (
    PREDICTIONS,
    checked_summary,
    read_command,
    read_metrics,
    read_predictions,
    status_of,
)
from tests.runtime.changed import NUMBERS, VALUES, changed_value, flipped
from tests.runtime.clicks_of_a_user import write_clicks
from tests.runtime.test_checkpoint_folders import Store, write

MEMORY = 2 * 2**30
"""Bytes that reading may take beside what is there before."""
LAYOUT = Layout(fields=(Field(name="user"), Field(name="tags")), dense=("age",))
"""Of the kept part."""
CPU_S = 20
"""For one input."""
DTYPES = ["<u8", "<u4", "|u1", "<i8", "<f4", "<f8", "|b1", "<U3", "<c8"]


def made(folder: Path) -> None:
    """What a run writes, small."""
    store = Store()
    store.train(3, 5, 7, 11)
    checkpoint = write(folder, 10, store).folder
    for name in (STATE, DENSE, TRACE):
        shutil.move(checkpoint / name, folder / name)
    shutil.move(checkpoint / ROWS, folder / ROWS)
    write_sketches(folder / TRAINED, (NO_ROWS, NO_ROWS))
    of_samples = {"labels": np.zeros((9, 1), np.int8), "groups": np.arange(9)}
    with (folder / PREDICTIONS).open("wb") as file:
        np.savez_compressed(file, predictions=np.zeros((9, 1), np.float32), **of_samples)
    scores = {"tasks": {"click": {"auc": 0.5, "log_loss": None}}}
    documents: dict[str, Any] = {
        "config.json": {"sync": {"mode": "sync", "ranks": 2}, "data": {"name": "synthetic"}},
        "summary.json": {**scores, "mode": "sync", "steps": 3, "staleness": {}, "samples": 5},
        "command.json": {"train": ["--seed", "1"], "resume": [["--steps", "4"]]},
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    line = {"updates": 1, "samples": 2, "drained": True, **scores}
    (folder / "metrics.jsonl").write_text(f"{json.dumps(line)}\n" * 3)
    write_clicks(folder)
    part = PartWriter(folder / "part", 1 << 20)
    for ids in (np.arange(6), np.arange(7)):
        dense = np.zeros((3, len(LAYOUT.dense)), np.float32)
        offsets = np.array([0, 1, 2, 3, 4, 5, len(ids)])
        part.add(Batch(ids.astype(np.uint64), offsets, dense, np.ones((3, 1), np.float32)))
    part.finish()
    facts = Provenance(name="kept", sha256="0", split="", absent={"user": 0.5})
    (folder / "provenance.json").write_text(json.dumps(asdict(facts)))
    (folder / "ending.json").write_text(json.dumps({"status": 75, "by": "TERM", "told": "ended"}))


# One change each; files have their right digests.


def of_document(draw: random.Random, file: Path) -> None:
    """Values of a JSON document, in the form of a bomb now and then; sealed anew, if it was."""
    if draw.random() < 0.15:
        file.write_bytes(flipped(draw, file.read_bytes()))
        return
    if draw.random() < 0.02:
        depth = draw.choice([900, 10_000, 10**6])
        file.write_text(draw.choice(["[", '{"a":', "[{}, "]) * depth)
        return
    document = json.loads(file.read_text())
    is_sealed = document.pop("digest", None) is not None
    for _ in range(draw.choice([1, 1, 2, 3])):
        document = changed_value(draw, document)
    if is_sealed and isinstance(document, dict):
        write_sealed(file, document)
    else:
        file.write_text(json.dumps(document))


def of_text(draw: random.Random, file: Path) -> None:
    """Bytes and words of a text."""
    content = file.read_bytes()
    if draw.random() < 0.5:
        words = content.split(b" ")
        place = draw.randrange(len(words))
        words[place] = json.dumps(draw.choice([*VALUES, "../**/*.csv", "/dev/zero"])).encode()
        content = b" ".join(words)
    file.write_bytes(flipped(draw, content) if draw.random() < 0.7 else content)


def of_bytes(draw: random.Random, file: Path) -> None:
    """Bytes of any file."""
    file.write_bytes(flipped(draw, file.read_bytes()))


def an_array(draw: random.Random, array: np.ndarray) -> np.ndarray:
    """The array with other values, another shape or type."""
    match draw.randrange(5):
        case 0 if array.size and array.dtype.kind in "iu":
            limits = np.iinfo(array.dtype)
            every = [n for n in NUMBERS if limits.min <= n <= limits.max]
            result = array.copy()
            result.reshape(-1)[draw.randrange(array.size)] = draw.choice(every)
            return result
        case 1:
            return array[: draw.randrange(len(array) + 1)] if array.ndim else array
        case 2:
            return np.concatenate([array] * draw.choice([2, 9])) if array.ndim else array
        case 3:
            return np.zeros(draw.choice([(0,), (3,), (3, 1), (1, 0), (2, 2, 2)]), array.dtype)
        case _:
            return np.zeros(array.shape, draw.choice(DTYPES))


def of_arrays(draw: random.Random, file: Path) -> None:
    """Arrays and facts of a file of ours."""
    facts, arrays = read_arrays(file, digest_of(file))
    if draw.random() < 0.3:
        return of_bytes(draw, file)
    if draw.random() < 0.3:
        facts = changed_value(draw, facts)
    for _ in range(draw.choice([1, 1, 2])):
        name = draw.choice(sorted(arrays))
        fresh = an_array(draw, arrays[name])
        arrays[name] = fresh if fresh.dtype.str in DTYPES[:5] else arrays[name]
        if draw.random() < 0.1:
            del arrays[name]
            break
    write_arrays(file, facts, arrays, flush=False)
    return None


def of_npz(draw: random.Random, file: Path) -> None:
    """Arrays of an archive, or what only claims to be one."""
    if draw.random() < 0.3:
        return of_bytes(draw, file)
    with np.load(file) as arrays:
        every = dict(arrays)
    name = draw.choice(sorted(every))
    if draw.random() < 0.2:  # the header of an array that is not there
        shape = draw.choice(["(1000000000000,)", "(4611686018427387904,)", "(-1,)", "(99999999,)"])
        header = f"{{'descr': '{draw.choice(DTYPES)}', 'fortran_order': False, 'shape': {shape}, }}"
        text = header.ljust(117).encode() + b"\n"
        entry = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
        zeros = bytes(draw.choice([0, 100, 10**7]))
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for other in every:
                if other != name:
                    raw = io.BytesIO()
                    np.save(raw, every[other])
                    archive.writestr(f"{other}.npy", raw.getvalue())
            archive.writestr(f"{name}.npy", entry + zeros)
        return None
    every[name] = an_array(draw, every[name])
    if draw.random() < 0.1:
        del every[name]
    with file.open("wb") as out:
        draw.choice([np.savez, np.savez_compressed])(out, **every)
    return None


def read_rows(folder: Path) -> None:
    """Into the tables of a server."""
    load(Store().rows, folder / ROWS)


def changed_rows(draw: random.Random, file: Path) -> None:
    """A file of rows and its digest, or the manifest."""
    if draw.random() < 0.4:
        return of_document(draw, file)
    document = json.loads(file.read_text())
    document.pop("digest")
    rows = next(file.parent.glob("*.rows"))
    of_arrays(draw, rows)
    document["digests"] = [digest_of(rows)]
    write_sealed(file, document)
    return None


def changed_part(draw: random.Random, file: Path) -> None:
    """A chunk of a kept part and its digest, or the list of the chunks."""
    if draw.random() < 0.4:
        return of_document(draw, file)
    document = json.loads(file.read_text())
    document.pop("digest")
    of_arrays(draw, file.with_name("1"))
    document["digests"][1] = digest_of(file.with_name("1"))
    write_sealed(file, document)
    return None


def read_part(folder: Path) -> None:
    """Its batches, of which the kernels count the lengths."""
    for batch in cached_chunks(folder / "part", LAYOUT):
        batch.take(np.arange(batch.size)[::-1])


def read_facts(folder: Path) -> None:
    """What is known of kept data."""
    file = folder / "provenance.json"
    str(parse(Provenance, read_document(file), str(file)))


def matched(folder: Path) -> None:
    """The schema, and the files that it names."""
    schema, place = read_schema(folder / "clicks.toml")
    matching(place, schema.file)


KINDS: list[tuple[str, Callable[[random.Random, Path], None], Callable[[Path], object]]] = [
    (STATE, of_document, read_checkpoint),
    (f"{ROWS}/{MANIFEST}", changed_rows, read_rows),
    (DENSE, of_bytes, lambda folder: read_dense(folder / DENSE, digest_of(folder / DENSE))),
    (TRACE, of_npz, lambda folder: Trace.load(folder / TRACE)),
    (TRAINED, of_arrays, lambda f: read_sketches(f / TRAINED, digest_of(f / TRAINED))),
    (PREDICTIONS, of_npz, read_predictions),
    ("config.json", of_document, lambda folder: read_config(folder / "config.json")),
    ("summary.json", of_document, checked_summary),
    ("command.json", of_document, read_command),
    ("metrics.jsonl", of_text, read_metrics),
    ("clicks.toml", of_text, matched),
    ("part/part.json", changed_part, read_part),
    ("provenance.json", of_document, read_facts),
    ("ending.json", of_document, status_of),
    ("config.json", of_bytes, lambda folder: read_document(folder / "config.json")),
]


def main(seed: int, first: int, count: int) -> None:
    """Read them all."""
    read = refused = 0
    with tempfile.TemporaryDirectory() as folder:
        given, place = Path(folder) / "given", Path(folder) / "run"
        given.mkdir()
        made(given)
        for _, _, reader in KINDS:  # what is imported late
            reader(given)
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY,) * 2)
        for number in range(first, first + count):
            print(f"\rinput {number} of seed {seed}", end="", flush=True)
            draw = random.Random(f"{seed} {number}")
            name, change, reader = KINDS[number % len(KINDS)]
            shutil.copytree(given, place)
            change(draw, place / name)
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            try:
                reader(place)
                read += 1
            except ValueError as error:
                refused += 1
                assert len(str(error).splitlines()) == 1 or name == "clicks.toml", error
                assert "MemoryError" not in str(error), error
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            shutil.rmtree(place)
    print(f"\n{read} read, {refused} refused")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
