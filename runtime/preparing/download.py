"""`persia-runtime data`: list the data sets and where they lie; fetch one from its publisher.

What is fetched is checked, converted, and whole or not at all.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import lzma
import os
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

from persia_sim.base.command_line import POSITIONAL, read_options
from persia_sim.base.files import atomic_write, unfinished_folder
from persia_sim.base.rules import printable
from persia_sim.base.schema import nearest
from runtime.data.catalogue import CATALOGUE, Publication, downloads, find_folder
from runtime.data.errors import DataError
from runtime.data.synthetic import presets, recipe
from runtime.files import table_beside

Report = Callable[[int, int | None], None]
"""Called with the bytes received so far and the bytes announced (None: not announced)."""
TIMEOUT_S = 60.0
"""Longest silence of the publisher's server."""
LONGEST_S = 6 * 3600.0
"""Seconds of a whole download, at most; a server that sends a little now and then is never
silent."""
LARGEST_DOWNLOAD_BYTES = 4 << 30
"""Bytes of an archive, at most; the largest real one has 0.9 GB. Stops a server that sends for
ever."""
BLOCK_BYTES = 1 << 20
LARGEST_MEMBER_BYTES = 4 << 30
"""Bytes of one unpacked file, at most; the largest real one has 80 MB. Stops an archive that
unpacks for ever."""
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

    The archive's sha256 stands in TERMS.txt beside it, and is that of the publication, if known.
    """
    # What is there stays.
    wanted = publication(name) if isinstance(name, str) else name
    folder = downloads() if folder is None else folder
    target = folder / wanted.name / "data.parquet"
    if target.is_file():
        return target
    if os.path.lexists(target):
        raise DataError(f"{target} is no file: it would be lost; move it, or choose another folder")
    try:
        # Work in a folder that goes when anything fails; the archive must be the published one.
        target.parent.mkdir(parents=True, exist_ok=True)
        with unfinished_folder(target.parent / "archive") as work:
            archive = work / Path(wanted.url).name
            sha256 = fetch(wanted.url, archive, report)
            if wanted.sha256 not in (None, sha256):
                raise DataError(
                    f"{wanted.url} has sha256 {sha256}\n  but {wanted.sha256} was published: it was"
                    " changed, or damaged on the way\n  try again"
                )
            extract(archive, wanted.members, work)
            import pyarrow.compute as pc
            import pyarrow.parquet as pq

            # The table comes last and at once, behind its terms: half a file is never taken for
            # data.
            table = kuairand_table([work / member for member in wanted.members])
            if wanted.first_day is not None:
                table = table.filter(pc.greater_equal(table["date"], wanted.first_day))
            pq.write_table(table, work / target.name, compression="zstd")
            sentences = f"{wanted.name}: {wanted.terms}\n{wanted.url}\nsha256 {sha256}\n"
            sentences += compared_values(wanted, table)
            with atomic_write(target.parent / "TERMS.txt") as terms:
                terms.write(sentences.encode())
            (work / target.name).replace(target)
    except OSError as error:
        raise DataError(
            f"cannot write {wanted.name} to {folder}: {error.strerror or error}\n"
            "  make room or choose another folder (XDG_CACHE_HOME), then try again"
        ) from error
    return target


def compared_values(wanted: Publication, table: Any) -> str:
    """In words, whether these are the values with which stored results were made; "" where there
    are no such results."""
    if wanted.values_sha256 is None:
        return ""
    if values_sha256(table) == wanted.values_sha256:
        return f"{table.num_rows:,} rows, whose values are those of the stored results\n"
    return (
        f"{table.num_rows:,} rows, whose values are not those of the stored results: figures made"
        " from them may differ from the ones in docs/results\n"
    )


def values_sha256(table: Any) -> str:
    """Checksum of a table of whole numbers and texts, whatever the order of its columns and rows.

    Widths of numbers, and how an absent text is stored, do not count.
    """
    # Columns by name in one form, then rows in the order of their values.
    rows = table.select(sorted(table.column_names)).to_pandas()
    numbers = {name for name in rows if rows[name].dtype.kind in "iu"}
    rows = rows.astype({name: "<i8" for name in numbers}).fillna("")
    rows = rows.sort_values(list(rows))

    digest = hashlib.sha256()
    for name in rows:
        values = (
            rows[name].to_numpy().tobytes() if name in numbers else "\0".join(rows[name]).encode()
        )
        digest.update(name.encode() + b"\0" + values)
    return digest.hexdigest()


def fetch(url: str, path: Path, report: Report | None = None) -> str:
    """Write what the URL holds to ``path`` and return its sha256.

    Raises DataError for what cannot be had, is larger than an archive may be, or takes too long.
    """
    # What has come is hashed and bounded as it comes: no publisher is trusted with the disk.
    digest = hashlib.sha256()
    received = 0
    announced = None
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

    # A connection that ends early is no error of HTTP.
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


def extract(archive: Path, members: tuple[str, ...], folder: Path) -> None:
    """Unpack the wanted members, and nothing else, straight into the folder.

    Names inside the archive only choose a member by their last part; they never become a path.
    """
    # Each wanted member is bounded as it is unpacked: a small archive may hold a huge file.
    missing = set(members)
    try:
        for name, stream in _files(archive):
            base = name.rpartition("/")[2]
            if base in missing:
                missing.remove(base)
                with (folder / base).open("xb") as out:
                    while block := stream.read(BLOCK_BYTES):
                        if out.tell() + len(block) > LARGEST_MEMBER_BYTES:
                            most = f"{LARGEST_MEMBER_BYTES} bytes"
                            raise DataError(f"{base} unpacks to more than {most}; refused")
                        out.write(block)
    except _DAMAGED as error:
        raise DataError(f"{archive.name} is no archive or is damaged: {error}") from error

    # All of them must have been there.
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


def kuairand_table(files: Sequence[Path]) -> Any:
    """The two standard-policy logs in time order, with user and video features.

    Repeats of (user, video, time) are dropped; an absent number becomes -1 (of music: 0), an absent
    text stays absent. What is known only after the impression, and statistics over the whole
    period, are left out.
    """
    import pandas as pd
    import pyarrow as pa

    # The impressions, without repeats, in the order of time that a split by time needs.
    *logs, users_file, videos_file = files
    known = table_beside(__file__)["kuairand"]
    texts = known["user_texts"]
    numbers = known["user_numbers"]
    log = pd.concat([_csv(file, known["log"]) for file in logs])
    log = log.drop_duplicates(["user_id", "video_id", "time_ms"])
    log = log.sort_values("time_ms", kind="stable")

    # Facts of users and videos, brought to each impression.
    users = _csv(users_file, ["user_id", *texts, *numbers])
    videos = _csv(videos_file, known["video"])
    width, height = (_whole(videos[f"server_{side}"]).astype(str) for side in ("width", "height"))
    videos["frame"] = width + "x" + height

    user = users.set_index("user_id").reindex(log["user_id"])
    video = videos.set_index("video_id").reindex(log["video_id"])
    columns: dict[str, Any] = {
        "label": _whole(log["is_click"]),
        **{name: _whole(log[name]) for name in ("long_view", "date", "time_ms")},
        "hour": _whole(log["hourmin"]) // 100,
        **{name: _whole(log[of]) for name, of in known["log_kept"].items()},
        "author": _whole(video["author_id"]),
        "music": _whole(video["music_id"], absent=0),
        "music_type": _whole(video["music_type"]),
        "duration_ms": _whole(log["duration_ms"]),
    }
    columns |= {name: video[name] for name in known["video_kept"]}
    columns |= {name: user[name] for name in texts}
    columns |= {name: _whole(user[name]) for name in numbers}
    return pa.table({name: pa.array(c.to_numpy(), from_pandas=True) for name, c in columns.items()})


def _csv(path: Path, columns: list[str]) -> Any:
    import pandas as pd

    try:
        return pd.read_csv(path, usecols=columns)
    except ValueError as error:
        raise DataError(f"{path.name} of the archive is not as documented: {error}") from error


def _whole(column: Any, absent: int = -1) -> Any:
    """A column of whole numbers; the publisher's files hold some as 1.0, and gaps."""
    return column.fillna(absent).astype("int64")


@dataclass(frozen=True, slots=True, kw_only=True)
class List:
    """The data sets, and where each was found."""

    data_dir: Path | None = None
    """Look here first, as ~/data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Get:
    """Download a data set from its publisher."""

    name: Annotated[str, POSITIONAL]
    """kuairand-pure-14d, kuairand-pure or kuairand-1k."""
    to: Path | None = None
    """Folder, as ~/data; else the user's folder of data, or PERSIA_DATA_DIR."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """Guess the schema of a table from its first 100,000 rows (where it splits: from all); printed,
    with what is uncertain."""

    file: Annotated[Path, POSITIONAL]
    """CSV (also .gz) with a header line, or parquet. Example: clicks.csv."""
    delimiter: str | None = None
    """What stands between the values of a text file, if it is not a comma. Example: ';'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Hold every row against its schema: absent, unseen and bad values of each column."""

    name: Annotated[str, POSITIONAL]
    """A schema, as clicks.toml, or the name of a data set."""
    data_dir: Path | None = None
    """Folder with the real data sets, as in training. Example: ~/data."""


def run(arguments: Sequence[str]) -> None:
    """Carry out ``list``, ``get NAME``, ``schema FILE`` or ``check SCHEMA``."""
    # One verb, and the options of that one.
    verb, *words = arguments or [""]
    command = f"persia-runtime data {verb}"
    if verb == "list":
        print(listed(read_options(List, words, command).data_dir))
    elif verb == "get":
        options = read_options(Get, words, command)
        _fetch(options.name, options.to)
    elif verb == "schema":
        from runtime.preparing.guess import guessed

        table = read_options(Guess, words, command)
        print(guessed(table.file, table.delimiter), end="")
    elif verb == "check":
        _check(read_options(Check, words, command))
    elif verb in ("", "-h", "--help"):
        print(f"usage: persia-runtime data {VERBS}   (--help behind each says more)")
    else:
        raise ValueError(f"data {verb} is no command; there are: {VERBS}")


VERBS = "list | get NAME | schema FILE | check SCHEMA"


def _check(options: Check) -> None:
    from runtime.data.files import FileSource
    from runtime.data.open import open_source
    from runtime.preparing.check import check, report_text

    if options.name.partition(":")[0] == "synthetic":
        raise DataError(f"{options.name} is made on the fly: it has no columns to check")
    source = open_source(options.name, options.data_dir, skip_bad_rows=True)
    assert isinstance(source, FileSource)
    print(printable(report_text(*check(source)), keep="\n"))


def listed(data_dir: Path | None) -> str:
    """One line a data set: its name, where it lies, what it is."""
    rows = []
    for name, ready in CATALOGUE.items():
        try:
            place = str(find_folder(ready(), data_dir))
        except DataError:
            place = "-" if ready.publication is None else "data get"
        rows.append((name, place, ready.about))
    for name in presets():
        ids = f"{recipe(name).distinct_ids:,} distinct ids"
        rows.append((f"synthetic:{name}", "made on the fly", ids))
    widths = [max(len(row[n]) for row in rows) for n in range(2)]
    lines = [f"{name:<{widths[0]}}  {place:<{widths[1]}}  {what}" for name, place, what in rows]
    lines.append("A schema file of your own (.toml) is named by its path.")
    return "\n".join(lines)


def publication(name: str) -> Publication:
    """A downloadable data set by name."""
    known = {
        published.name: published
        for r in CATALOGUE.values()
        if (published := r.publication) is not None
    }
    if name not in known:
        raise DataError(
            f"no download is called {name!r}; {nearest(name, known)}\n"
            "  other data sets have terms to accept on their publishers' pages: put their files in "
            "a folder and give it as the data directory"
        )
    return known[name]


def _fetch(name: str, folder: Path | None) -> None:
    from persia_sim.base.progress import Progress

    wanted = publication(name)
    print(f"{wanted.url}\n{wanted.terms}")
    with Progress(unit="B", unit_scale=True, desc=name, delay=0.3) as bar:

        def report(received: int, announced: int | None) -> None:
            bar.total = announced
            bar.update(received - bar.n)

        path = get(wanted, folder, report)
    print(f"{name} lies in {path}")
    terms = path.parent / "TERMS.txt"
    if wanted.values_sha256 is not None and terms.is_file():
        print(terms.read_text().splitlines()[-1])
