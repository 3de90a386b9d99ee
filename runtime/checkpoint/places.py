"""Where the checkpoints of a run lie: in its folder, and in the store behind that, if one is.

In a store a checkpoint has the names that it has here, and its state is sent last. A working folder
has all but the rows, which go between the store and the servers.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

from runtime.checkpoint.shard import MANIFEST
from runtime.files import digest_of
from runtime.object_store import URL_FILE, Store, store_behind, url_of, working_folder
from runtime.store_claim import check_claim

CHECKPOINTS = "checkpoints"
STATE = "state.json"
ROWS = "rows"
DENSE = "dense.pt"
TRACE = "trace.npz"
RECORDINGS = "servers.arrays"
TRAINED = "trained.arrays"
SEALED = (f"{ROWS}/{MANIFEST}", DENSE, TRACE, RECORDINGS, TRAINED)
"""The files that a state may name, by their path in its folder."""
_ROWS_FILE = re.compile(r"[0-9a-f]{12}-shard-[0-9]{4,}\.rows")
_UNFINISHED = re.compile(r"(\.[0-9]+\.[0-9a-f]{8})?\.tmp$")
"""What a name ends in while its file is being written."""
_CHECKPOINT = re.compile(r"[0-9]{15}")
_DOCUMENT = re.compile(r"[a-z]+\.jsonl?")
"""What a run, a checkpoint or an export writes about itself; a store is asked for no other."""


def folder_of(run: Path, samples: int) -> Path:
    """Where the checkpoint of this cursor lies in a run's folder; they sort by name."""
    return run / CHECKPOINTS / f"{samples:015d}"


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has the name and the place of a checkpoint, as `folder_of` gives them."""
    named = _CHECKPOINT.fullmatch(folder.name) is not None
    return named and folder.parent.name == CHECKPOINTS


def run_of(checkpoint: Path) -> Path:
    """The run's folder that a checkpoint's folder lies in; a copy elsewhere stands for itself."""
    within = checkpoint.parent.name == CHECKPOINTS
    return checkpoint.parent.parent if within else checkpoint


def complete_checkpoints(run: Path) -> list[Path]:
    """The folders of a run's complete checkpoints, the newest last."""
    states = (run / CHECKPOINTS).glob(f"[0-9]*/{STATE}")
    return sorted(file.parent for file in states if is_checkpoint(file.parent))


def refuse_ways_out(run: Path) -> None:
    """Raise ValueError where what is written into a run's folder, or removed there, would be in
    another one; whoever fills the folder asks before."""
    checkpoints = run / CHECKPOINTS
    if checkpoints.is_symlink():
        raise ValueError(
            f"{checkpoints} is a link to {checkpoints.resolve()}: a run writes and removes in its"
            " own folder alone; put the folder itself there"
        )
    for folder in (run, *checkpoints.glob("*")):
        store_behind(folder)


def remove_checkpoint(folder: Path) -> None:
    """Remove what a run writes into a checkpoint's folder, here and in the store behind it, and the
    folder if nothing else is left: what somebody else has put there is theirs. No link is followed.
    What cannot be removed goes with the next."""
    # In the store all of a folder goes at once, or, where there is more than ours, its state.
    behind = store_behind(folder)
    if behind is not None:
        with suppress(OSError):
            behind.remove(STATE)  # first: half of a folder must not count
            if all(map(_is_ours, behind.names())):
                behind.remove("")

    # Here the folder may be a link: moved to another disk by somebody, whose copy it is now.
    if folder.is_symlink():
        folder.unlink()
        return
    with suppress(OSError):
        (folder / STATE).unlink(missing_ok=True)
    for place in (folder / ROWS, folder):
        with suppress(OSError):
            listed = [] if place.is_symlink() else [*place.iterdir()]
            for file in listed:
                if _is_ours(file.relative_to(folder).as_posix()) and not _is_folder(file):
                    file.unlink()
            place.unlink() if place.is_symlink() else place.rmdir()


def _is_ours(name: str) -> bool:
    """Whether a run writes a file of this name into a checkpoint's folder."""
    whole_name = _UNFINISHED.sub("", name)
    folder, _, file = whole_name.rpartition("/")
    is_of_rows = folder == ROWS and _ROWS_FILE.fullmatch(file) is not None
    return is_of_rows or whole_name in (*SEALED, STATE)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def send_checkpoint(run: Path, folder: Path) -> None:
    """Send a checkpoint to the store behind the run's folder, if one is, its state last. The rows
    are there already, each sent by its server."""
    behind = store_behind(folder)
    of_run = store_behind(run)
    if behind is None or of_run is None:
        return
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        if file.name != STATE:
            behind.put(file, file.relative_to(folder).as_posix())
    send_run_files(run)  # without its config nobody could go on with it
    check_claim(of_run.url)
    behind.put(folder / STATE, STATE)


def send_run_files(run: Path) -> None:
    """Send what lies in the run's folder itself to the store behind it, if one is; what says that
    the run is finished comes last."""
    behind = store_behind(run)
    if behind is None:
        return
    check_claim(behind.url)
    kinds = (".json", ".jsonl", ".npz")
    files = [file for file in run.iterdir() if file.suffix in kinds and file.is_file()]
    for file in sorted(files, key=lambda file: (file.name == "summary.json", file.name)):
        if file.name != URL_FILE:
            behind.put(file, file.name)


def remove_run_file(run: Path, name: str) -> None:
    """Remove what lies in the run's folder itself, here and in the store behind it."""
    (run / name).unlink(missing_ok=True)
    behind = store_behind(run)
    if behind is not None:
        behind.remove(name)


def fetched(path: str | Path, use: str = "read") -> Path:
    """The folder of a run, a checkpoint or an export where it is here. Of a URL: its working folder
    for this ``use``, with the documents that say what there is; other files come when they are
    read, and rows go to the servers that need them."""
    url = url_of(path)
    if url is None:
        return Path(path)
    store = Store(url)
    folder = working_folder(url, use)

    # An export, or one checkpoint: its one document.
    there = store.names(depth=1)
    states = [name for name in store.names(CHECKPOINTS) if _is_state(name)]
    if not there and not states and use == "read":
        raise ValueError(
            f"{url} does not exist, or is empty; give the folder of a run, or of one of"
            " its checkpoints"
        )
    documents = [name for name in (MANIFEST, STATE) if name in there]
    for name in documents:
        store.get(name, folder / name)
    if documents:
        return folder

    # A run: its own documents, and the state of each checkpoint that is whole; others go.
    for name in there:
        if _DOCUMENT.fullmatch(name):
            store.get(name, folder / name)
    for checkpoint in complete_checkpoints(folder):
        if f"{CHECKPOINTS}/{checkpoint.name}/{STATE}" not in states:
            shutil.rmtree(checkpoint)
    for name in states:
        _fetch_state(store, name, folder / name)
    return folder


def _is_state(name: str) -> bool:
    """Whether a name in a store is the state of a checkpoint: it may be anything, also a way out
    of the folder that it is brought to."""
    folder, _, file = name.rpartition("/")
    return file == STATE and name.count("/") == 2 and is_checkpoint(Path(folder))


def _fetch_state(store: Store, name: str, file: Path) -> None:
    """The state of a checkpoint, as it is now; where it is another one, its files are others."""
    before = digest_of(file) if file.exists() else ""
    store.get(name, file)
    if before not in ("", digest_of(file)):
        for other in (other for other in file.parent.rglob("*") if other.is_file()):
            if other != file:
                other.unlink()


def checkpoints_in_store(run: Path) -> list[Path]:
    """Where the checkpoints would lie here that are in the store behind the run's folder, whole or
    not; none where no store is."""
    behind = store_behind(run)
    with suppress(OSError):
        names = [] if behind is None else behind.names(CHECKPOINTS)
        folders = {run / CHECKPOINTS / name.split("/")[1] for name in names}
        return sorted(filter(is_checkpoint, folders))
    return []
