"""From a name or a path to a source of batches, and parsed data that is kept.

With `keep`, files are parsed and hashed once, and read as arrays from then on. A part of a data set
is written down while a run streams it whole for the first time, and from then on every run that
reads the same files by the same schema reads that: points of a sweep, other modes, other seeds.
Several processes may do so at once; the first that is done wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import Any

from persia_sim.base.files import atomic_write, read_document
from persia_sim.base.schema import nearest, parse
from runtime.data.batch import Batch, Layout
from runtime.data.catalogue import CATALOGUE, downloads, find_folder
from runtime.data.errors import DataError
from runtime.data.files import FileSource
from runtime.data.rows import number_of
from runtime.data.schema import document, read_schema
from runtime.data.source import Part, Provenance, Source
from runtime.data.synthetic import SyntheticSource, presets, recipe
from runtime.data.table import main_files
from runtime.files import BrokenFileError, read_arrays, read_sealed, write_arrays, write_sealed

DEFAULT_TRAIN_ROWS = 12_000 * 256
"""Training samples of the synthetic stream: long enough for a trained model to come near the best
reachable AUC."""
DEFAULT_TEST_ROWS = 100_000
"""Test samples of the synthetic stream: the standard error of an AUC near 0.78 is about 0.0017."""


def open_source(
    name_or_path: str,
    data_dir: str | Path | None = None,
    rows: int | None = None,
    skip_bad_rows: bool = False,
    *,
    keep: bool = False,
    validation_fraction: float | None = None,
) -> Source:
    """Open a data set: a name of the catalogue, the path of a schema file (.toml) or `synthetic`.

    ``synthetic:PRESET`` has the field counts of a workload, ``synthetic:PRESET:SCALE`` with SCALE
    times its distinct ids (``synthetic:criteo-ad:0.01``), ``synthetic:PRESET:SCALE:DRAW`` another
    truth, other samples and other test samples (DRAW is 1 else).

    Real data is looked for in ``data_dir``, else in the directory that PERSIA_DATA_DIR names, then
    where ``data get`` puts downloads. ``rows`` keeps the first rows of the training part only, and
    of those ``validation_fraction`` (the schema's, unless given) validate. With ``keep``, what is
    parsed is kept among the downloads for the next run (`with_cache`). DataError for what
    cannot be opened, ValueError for ``rows`` below 1 or a share that is none.
    """
    # Options that would not be read are refused.
    is_synthetic = name_or_path.partition(":")[0] == "synthetic"
    if data_dir is not None and (is_synthetic or name_or_path.endswith(".toml")):
        raise DataError(
            f"--data.dir {str(data_dir)!r} is not used with {name_or_path}: it is where the ready"
            " data sets lie; remove it (the files of a schema lie beside the schema)"
        )
    if is_synthetic:
        unused = "is not used: the synthetic stream has"
        if skip_bad_rows:
            raise DataError(f"--data.skip-bad-rows {unused} no bad rows; remove it")
        if validation_fraction is not None:
            raise DataError(f"--data.validation-fraction {unused} a part for it; remove it")
        return _open_synthetic(name_or_path, rows)

    # The schema and the folder of its files.
    if name_or_path.endswith(".toml"):
        schema, folder = read_schema(Path(name_or_path))
    elif name_or_path in CATALOGUE:
        schema = CATALOGUE[name_or_path]()
        folder = find_folder(schema, data_dir)
    else:
        if (path := Path(name_or_path)).is_file():
            guess = f"persia-runtime data schema {quote(str(path))} > NEW.toml"
            raise DataError(f"{path} is no schema (.toml); if it is a table, guess one: {guess}")
        raise DataError(
            f"no data set is called {name_or_path!r}; "
            f"{nearest(name_or_path, ['synthetic', *CATALOGUE])}\n"
            "  a schema of your own is given by its path, which ends in .toml"
        )
    if validation_fraction is not None:
        split = replace(schema.split, validation_fraction=float(validation_fraction))
        schema = replace(schema, split=split)
    source = FileSource(schema=schema, folder=folder, rows=rows, skip_bad_rows=skip_bad_rows)
    return with_cache(source, downloads() / "parsed") if keep else source


def _open_synthetic(name: str, rows: int | None) -> SyntheticSource:
    # PRESET, SCALE and DRAW, each with its default.
    _, *choice = name.split(":")
    preset, scale_text, draw_text = (*choice, *("default", "1", "1")[len(choice) :])[:3]
    if preset not in presets():
        raise DataError(f"no synthetic preset is called {preset!r}; {nearest(preset, presets())}")
    try:
        scale = number_of(scale_text)
        if scale is None or not draw_text.isdecimal() or len(choice) > 3:
            given = ":".join(choice[1:])
            raise ValueError(f"SCALE must be a number and DRAW a whole one, got {given!r}")
        made = recipe(preset, scale, int(draw_text))
    except ValueError as error:
        raise DataError(
            f"{name}: {error}\n  write synthetic:PRESET:SCALE or synthetic:PRESET:SCALE:DRAW,"
            " as in synthetic:criteo-ad:0.01"
        ) from error

    # How many rows it has decides none of them.
    train_rows = DEFAULT_TRAIN_ROWS if rows is None else rows
    return SyntheticSource(recipe=made, train_rows=train_rows, test_rows=DEFAULT_TEST_ROWS)


_DIGESTS = "part.json"
_FACTS = "provenance.json"
_FORMAT = "persia-testbed-part-1"
_ABANDONED_S = 86_400
"""A half-written part of this age belongs to no living process."""
MOST_CACHED_BYTES = 4 << 30
"""Bytes of the whole folder; what was read longest ago goes first. A part of more than half is
not kept: a data set of that size streams as fast as it is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPart:
    """The files of a part, one a chunk, called by their numbers."""

    format: str
    digests: tuple[str, ...]


def cached_chunks(folder: Path, layout: Layout) -> Iterator[Batch]:
    """The chunks of a kept part; BrokenFileError where there is none, or at the first that is
    damaged, was removed meanwhile, or is of another layout."""
    part = read_sealed(KeptPart, folder / _DIGESTS, _FORMAT, "list of a kept part")
    with suppress(OSError):
        os.utime(folder.parent)  # used just now
    for number, digest in enumerate(part.digests):
        file = folder / str(number)
        arrays: dict[str, Any] = {"offsets": None, **read_arrays(file, digest)[1]}
        try:
            batch = Batch(**arrays)
            batch.refuse_unlike(layout)
        except (ValueError, TypeError) as error:
            raise BrokenFileError(f"{file} is no chunk of a part: {error}") from error
        yield batch


class PartWriter:
    """Takes the chunks of a part as they stream by; keeps all of them or nothing.

    A disk that is full or may not be written is no error: then nothing is kept.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._target = folder
        self._left_bytes = most_bytes
        self._digests: list[str] = []
        self._fresh: Path | None = None
        with suppress(OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            for entry in folder.parent.glob(".*"):  # half-written, of a process that was killed
                if time.time() - entry.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(entry, ignore_errors=True)
        with suppress(OSError):
            self._fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))

    def add(self, chunk: Batch) -> None:
        """The next samples."""
        if self._fresh is None:
            return
        arrays = chunk.named()
        try:
            file = self._fresh / str(len(self._digests))
            written = write_arrays(file, {}, arrays, flush=False)  # its digest tells a crash
        except OSError:
            self.discard()
            return
        self._digests.append(written.digest)
        self._left_bytes -= written.file_bytes
        if self._left_bytes < 0:
            self.discard()

    def finish(self) -> bool:
        """All samples are here: give the part its name. Whether it is kept by this process."""
        if self._fresh is None or not self._digests:
            return False
        try:
            part = KeptPart(format=_FORMAT, digests=tuple(self._digests))
            write_sealed(self._fresh / _DIGESTS, part)
            self._fresh.rename(self._target)
        except OSError:  # full, or another process was faster
            return False
        return True

    def discard(self) -> None:
        """Keep nothing of what is not finished."""
        if self._fresh is not None:
            shutil.rmtree(self._fresh, ignore_errors=True)
            self._fresh = None


@dataclass
class CachedSource:
    """A data set on disk, by its kept parts where they are there."""

    parsed: FileSource
    """Where they are not."""
    root: Path
    """Folder of all kept data."""
    most_bytes: int = MOST_CACHED_BYTES

    @property
    def layout(self) -> Layout:
        """Fields, dense features and tasks."""
        return self.parsed.layout

    def chunks(self, part: Part) -> Iterator[Batch]:
        """The samples of one part in the file's own order; parsed from where what is kept ends."""
        # What an earlier run has parsed is mapped into memory.
        folder = self._folder
        given = 0
        try:
            for chunk in cached_chunks(folder / part, self.layout):
                yield chunk
                given += chunk.size
            return
        except BrokenFileError:
            shutil.rmtree(folder / part, ignore_errors=True)

        # Where that ends or is broken, parse from the start, keep it, and give on what was not
        # given yet.
        writer = PartWriter(folder / part, self.most_bytes // 2)
        try:
            for chunk in self.parsed.chunks(part):
                writer.add(chunk)
                if given < chunk.size:
                    yield chunk.rows(given, chunk.size) if given else chunk
                given = max(given - chunk.size, 0)
            if self._is_unchanged() and writer.finish():
                make_room(self.root, self.most_bytes, folder)
        finally:
            writer.discard()

    def provenance(self) -> Provenance:
        """Name, checksum and split, known without reading the files again."""
        return replace(self._facts, private=self.parsed.is_private)  # a mode changes without bytes

    @cached_property
    def _facts(self) -> Provenance:
        file = self._folder / _FACTS
        try:
            return parse(Provenance, read_document(file), str(file))
        except (OSError, ValueError):
            result = self.parsed.provenance()
            if self._is_unchanged():
                with suppress(OSError):
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with atomic_write(file) as out:
                        out.write(json.dumps(asdict(result)).encode())
        return result

    @cached_property
    def _folder(self) -> Path:
        with suppress(OSError):  # a place that cannot be written keeps nothing
            self.root.mkdir(parents=True, exist_ok=True)
            self.root.chmod(0o700)  # ids and labels of files that may be the user's alone
        return self.root / self._key()

    def _is_unchanged(self) -> bool:
        """Whether the files are still those that the folder is of."""
        with suppress(DataError):
            return self._key() == self._folder.name
        return False

    def _key(self) -> str:
        """Digest of what decides the parse: the files, how they are read, and by which code."""
        source = self.parsed
        meaning = json.dumps([source.schema.name, document(source.schema), source.rows])
        decides = [*source.checksums(), meaning, parser_version()]
        return hashlib.sha256("\n".join(decides).encode()).hexdigest()[:32]


def with_cache(source: FileSource, root: Path) -> FileSource | CachedSource:
    """The source by way of kept parts, where it may be kept.

    Bad rows that are left out are counted while they are read, and files that are larger than what
    is kept would not fit: such data is parsed anew each time.
    """
    files = main_files(source.schema, source.folder)
    size_bytes = sum(path.stat().st_size for path in files if path.is_file())
    if source.skip_bad_rows or size_bytes > MOST_CACHED_BYTES // 2:
        return source
    return CachedSource(source, root)


def make_room(root: Path, most_bytes: int, newest: Path) -> None:
    """Remove what was used longest ago, but ``newest``, until the folder is small enough."""
    try:
        folders = [entry for entry in root.iterdir() if entry.is_dir() and entry != newest]
        by_age = sorted(folders, key=lambda folder: folder.stat().st_mtime)
        total = sum(map(folder_bytes, [newest, *by_age]))
        for folder in by_age:
            if total <= most_bytes:
                return
            total -= folder_bytes(folder)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # another process is making room, too


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below it."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@cache
def parser_version() -> str:
    """A digest of the code that parses: this folder's sources and the libraries behind them."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    libraries = [metadata.version(name) for name in ("pyarrow", "numpy")]
    return f"{digest.hexdigest()} {libraries} {os.uname().machine}"
