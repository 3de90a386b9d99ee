"""`python -m runtime data`: list the data sets and where they lie; fetch one from its publisher.

What is fetched is checked, converted, and whole or not at all.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import json
import lzma
import os
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

from runtime.command_line import POSITIONAL, read_options
from runtime.data.catalogue import CATALOGUE, downloads, find_folder
from runtime.data.errors import DataError
from runtime.data.presets import PRESETS, recipe
from runtime.data.publishers import PUBLICATIONS, Publication, publication

Report = Callable[[int, int | None], None]
"""Called with the bytes received so far and the bytes announced (None: not announced)."""
TIMEOUT_S = 60.0
"""Longest silence of the publisher's server."""
LONGEST_S = 6 * 3600.0
"""Of a whole download; a server that sends a little now and then is never silent."""
LARGEST_DOWNLOAD_BYTES = 4 << 30
"""Of an archive; the largest real one has 0.9 GB. Stops a server that sends for ever."""
BLOCK_BYTES = 1 << 20
LARGEST_MEMBER_BYTES = 4 << 30
"""Of one unpacked file; the largest real one has 80 MB. Stops an archive that unpacks for ever."""
PINS = "pins.json"
# What the readers of archives raise for bytes that are none: gzip's is an OSError, zipfile tells of
# a password by RuntimeError and of an unknown compression by NotImplementedError.
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    lzma.LZMAError,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
)


def get(name: str | Publication, folder: Path | None = None, report: Report | None = None) -> Path:
    """Fetch a data set unless it is there; returns its ``data.parquet``.

    The archive's sha256 is compared with the pinned one: the publication's own if it is known, else
    the one that the first download wrote to FOLDER/pins.json.
    """
    wanted = publication(name) if isinstance(name, str) else name
    folder = downloads() if folder is None else folder
    target = folder / wanted.name / "data.parquet"
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=target.parent) as work:
            archive = Path(work) / Path(wanted.url).name
            sha256 = fetch(wanted.url, archive, report)
            check_pin(folder / PINS, wanted, sha256)
            extract(archive, wanted.members, Path(work))
            _write_table(wanted, Path(work), target)
    except OSError as error:
        raise DataError(
            f"cannot write {wanted.name} to {folder}: {error.strerror or error}\n"
            "  make room or choose another folder (XDG_CACHE_HOME), then try again"
        ) from error
    return target


def fetch(url: str, path: Path, report: Report | None = None) -> str:
    """Write what the URL holds to ``path`` and return its sha256.

    Raises DataError for what cannot be had, is larger than an archive may be, or takes too long.
    """
    digest, received, announced = hashlib.sha256(), 0, None
    began_s = time.monotonic()
    request = urllib.request.Request(url, headers={"User-Agent": "persia-testbed"})
    with path.open("wb") as out:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                length = answer.headers.get("Content-Length")
                announced = int(length) if length and length.isdecimal() else None
                while block := answer.read1(BLOCK_BYTES):  # what has come, however little
                    digest.update(block)
                    received += len(block)
                    _refuse_endless(url, max(received, announced or 0), received, began_s)
                    out.write(block)
                    if report is not None:
                        report(received, announced)
        except urllib.error.HTTPError as error:
            raise DataError(
                f"{url} answered {error.code} {error.reason}\n"
                "  the publisher may have moved it: fetch it by hand from the data set's page"
            ) from error
        except (
            urllib.error.URLError,
            http.client.HTTPException,
            TimeoutError,
            ConnectionError,
        ) as error:
            raise DataError(
                f"cannot reach {url}: {getattr(error, 'reason', error)}\n"
                "  is there a network? Without one, train on the synthetic stream (synthetic)"
            ) from error
    if announced is not None and received != announced:
        raise DataError(f"{url} ended after {received} of {announced} bytes\n  try again")
    return digest.hexdigest()


def _refuse_endless(url: str, size_bytes: int, received: int, began_s: float) -> None:
    if size_bytes > LARGEST_DOWNLOAD_BYTES:
        raise DataError(
            f"{url} has {size_bytes:,} bytes or more, an archive has at most"
            f" {LARGEST_DOWNLOAD_BYTES:,}\n  fetch it by hand from the data set's page"
        )
    took_s = time.monotonic() - began_s
    if took_s > LONGEST_S:
        raise DataError(
            f"{url} sent {received:,} bytes in {took_s:,.0f} s, a download takes at most"
            f" {LONGEST_S:,.0f} s\n  try again later, or fetch it by hand from the data set's page"
        )


def check_pin(pins_path: Path, wanted: Publication, sha256: str) -> None:
    """Compare a checksum with the pinned one, or pin it."""
    pins = _pins(pins_path)
    expected = wanted.sha256 or pins.get(wanted.url)
    if expected is not None and sha256 != expected:
        raise DataError(
            f"{wanted.url} has sha256 {sha256}\n  but {expected} is pinned: the publisher changed "
            f"it, or it was damaged on the way\n  try again; to accept it, remove its line from "
            f"{pins_path}"
        )
    if expected is None:
        with _renamed_when_whole(pins_path) as unfinished:
            unfinished.write_text(json.dumps(pins | {wanted.url: sha256}, indent=2) + "\n")


def _pins(path: Path) -> dict[str, str]:
    """The pinned checksums by URL."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise DataError(
            f"{path} is damaged: it must hold one checksum a URL, as JSON; correct it, or remove it"
            " to pin the next downloads anew"
        )
    return found


def extract(archive: Path, members: tuple[str, ...], folder: Path) -> None:
    """Unpack the wanted members, and nothing else, straight into the folder.

    Names inside the archive only choose a member by their last part; they never become a path.
    """
    missing = set(members)
    try:
        for name, stream in _files(archive):
            base = name.rpartition("/")[2]
            if base in missing:
                missing.remove(base)
                with (folder / base).open("xb") as out:
                    _copy(stream, out, base)
    except _DAMAGED as error:
        raise DataError(f"{archive.name} is no archive or is damaged: {error}") from error
    if missing:
        raise DataError(
            f"{archive.name} holds no {', '.join(sorted(missing))}\n"
            "  the publisher changed the archive; fetch it by hand"
        )


def _files(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Regular files of a zip or tar archive, with their names."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as bundle:
            for info in bundle.infolist():
                if not info.is_dir():
                    with bundle.open(info) as stream:
                        yield info.filename, stream
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            stream_or_none = tar.extractfile(member) if member.isreg() else None
            if stream_or_none is not None:
                yield member.name, stream_or_none


def _copy(stream: IO[bytes], out: IO[bytes], name: str) -> None:
    copied = 0
    while block := stream.read(BLOCK_BYTES):
        copied += len(block)
        if copied > LARGEST_MEMBER_BYTES:
            raise DataError(f"{name} unpacks to more than {LARGEST_MEMBER_BYTES} bytes; refused")
        out.write(block)


def _write_table(wanted: Publication, work: Path, target: Path) -> None:
    import pyarrow.parquet as pq

    table = wanted.to_table(work)
    with _renamed_when_whole(target) as unfinished:
        pq.write_table(table, unfinished, compression="zstd")
    (target.parent / "TERMS.txt").write_text(f"{wanted.name}: {wanted.terms}\n{wanted.url}\n")


@contextmanager
def _renamed_when_whole(target: Path) -> Iterator[Path]:
    """A path beside the target; what was written there takes its place at the end of the block."""
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class List:
    """The data sets, and where each was found."""

    data_dir: Path | None = None
    """Look here first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Get:
    """Download a data set from its publisher."""

    name: Annotated[str, POSITIONAL]
    """kuairand-pure, kuairand-1k or adult-uci."""
    to: Path | None = None
    """Folder; else the user's folder of data, or PERSIA_DATA_DIR."""


def run(arguments: Sequence[str]) -> None:
    """Carry out ``list`` or ``get NAME``."""
    verb, *words = arguments or [""]
    command = f"python -m runtime data {verb}"
    if verb == "list":
        print(listed(read_options(List, words, command).data_dir))
    elif verb == "get":
        options = read_options(Get, words, command)
        _fetch(options.name, options.to)
    elif verb in ("-h", "--help"):
        print(f"usage: {command} list | get NAME   (--help behind either says more)")
    else:
        raise ValueError(f"data {verb} is no command; use data list, or data get NAME")


def listed(data_dir: Path | None) -> str:
    """One line a data set: its name, where it lies, what it is."""
    offered = {p.name for p in PUBLICATIONS}
    rows = []
    for name, ready in CATALOGUE.items():
        try:
            place = str(find_folder(ready(), data_dir))
        except DataError:
            place = "data get" if name in offered else "-"
        rows.append((name, place, ready.about))
    for name in PRESETS:
        ids = f"{recipe(name).distinct_ids:,} distinct ids"
        rows.append((f"synthetic:{name}", "made on the fly", ids))
    widths = [max(len(row[n]) for row in rows) for n in range(2)]
    lines = [f"{name:<{widths[0]}}  {place:<{widths[1]}}  {what}" for name, place, what in rows]
    lines.append("A schema file of your own (.toml) is named by its path.")
    return "\n".join(lines)


def _fetch(name: str, folder: Path | None) -> None:
    from tqdm import tqdm  # only a terminal needs it

    wanted = publication(name)
    print(f"{wanted.url}\n{wanted.terms}")
    with tqdm(unit="B", unit_scale=True, desc=name, delay=0.3) as bar:

        def report(received: int, announced: int | None) -> None:
            bar.total = announced
            bar.update(received - bar.n)

        path = get(wanted, folder, report)
    print(f"{name} lies in {path}")
