"""What a finished piece leaves beside its tables: what was run, where, when, and the checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.paper.pieces import Piece
from persia_sim.words.documents import read_document
from persia_sim.words.files import read_regular
from persia_sim.words.schema import parse
from runtime.run.folder import environment, write_json

FILE = "piece.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run of a piece."""

    arguments: list[str]
    """But for `--out`."""
    commit: str
    machine: str
    date: str
    """UTC, of its end."""
    seconds: float
    sha256: dict[str, str]
    """Of its tables."""

    @property
    def day(self) -> str:
        """Without the time of day."""
        return self.date[:10]


def command(study: str, arguments: Sequence[str]) -> str:
    """What a person types."""
    import shlex

    return shlex.join(["python", "-m", "experiments", study, *arguments])


def folder_of(piece: Piece, out: Path) -> Path:
    """Where a piece lies in the folder of a report."""
    return out / piece.study


def checksums(piece: Piece, folder: Path) -> dict[str, str]:
    """SHA-256 of its tables. Raises OSError naming one that is not there."""
    return {name: sha256(folder / name) for name in piece.csv}


def sha256(path: Path) -> str:
    """Of a file, in hexadecimal."""
    return hashlib.sha256(read_regular(path)).hexdigest()


def machine(about: Mapping[str, object]) -> str:
    """A run's machine in a few words, from its environment."""
    memory = about.get("memory_bytes")
    gib = f", {memory / 2**30:.0f} GiB" if isinstance(memory, int) else ""
    return f"{about.get('cpu')}, {about.get('cores')} cores{gib}"


def commit(about: Mapping[str, object]) -> str:
    """The commit of an environment, shortened, and whether files were changed since."""
    found = about.get("commit")
    changed = " and changed files" if about.get("modified") else ""
    return f"{str(found)[:10]}{changed}" if found else "unknown"


def keep(piece: Piece, folder: Path, arguments: Sequence[str], seconds: float) -> Record:
    """Write down that a piece has been run."""
    about = environment()
    record = Record(
        arguments=list(arguments),
        commit=commit(about),
        machine=machine(about),
        date=str(about["started"]),
        seconds=seconds,
        sha256=checksums(piece, folder),
    )
    write_json(folder / FILE, asdict(record))
    return record


def kept(piece: Piece, out: Path) -> Record | None:
    """The record of a piece; None where there is none, or where its tables are others by now."""
    folder = folder_of(piece, out)
    try:
        found = read_document(folder / FILE)
        record = parse(Record, found, str(folder / FILE), others=True)
        return record if record.sha256 == checksums(piece, folder) else None
    except (OSError, ValueError):
        return None


def is_done(piece: Piece, out: Path, arguments: Sequence[str]) -> bool:
    """Whether a piece has been run with these arguments, and its tables are still the same."""
    found = kept(piece, out)
    return found is not None and found.arguments == list(arguments)
