"""One hypothesis profile for all tests, Ctrl-C for their children, and where real data lies."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from runtime.embedding.native.extension import native

settings.register_profile("same", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("same")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Of a shell's background jobs; the commands under test would inherit it and miss Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


LAWS = range(1, 20)
"""Of docs/laws.md."""
HERE = Path(__file__).parent


gc.disable()  # What is imported now stays: to look through it for cycles takes seconds.


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole commands, which take longest, come first: nobody waits for them at the end. All other
    files by name, whatever their folder: some wait for processes while others compute.

    Of a function with the mark `first_case` all cases but the first one get the mark `long`.
    """
    seen = set[object]()
    for item in items:
        if item.get_closest_marker("first_case") and isinstance(item, pytest.Function):
            if item.function in seen:
                item.add_marker(pytest.mark.long)
            seen.add(item.function)
    items.sort(key=lambda item: (item.path.parent != HERE, item.path.name, item.path))


def pytest_configure(config: pytest.Config) -> None:
    for law in LAWS:
        config.addinivalue_line("markers", f"law{law}: holds law {law} of docs/laws.md")


@pytest.fixture(scope="session", autouse=True)
def _keep_nothing_at_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Data that runs keep parsed goes to a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _computes_with_denormals() -> Iterator[None]:
    """As hypothesis needs it, whichever test has begun as a command does (`enter_process`)."""
    yield
    native.flush_denormals(False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes file systems of so many KiB; skips where this user may not mount any."""
    places: list[Path] = []

    def mounted(kib: int) -> Path:
        place = tmp_path / f"disk of {kib} KiB"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("only root can mount a small file system here")
        places.append(place)
        return place

    yield mounted
    for place in places:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def real_data() -> Callable[[str], Path]:
    """The folder of the real data sets, for the one named; skips where nobody provides any.

    Where PERSIA_DATA_DIR is set, a set that is missing is a failure, not a skip.
    """

    def folder_with(name: str) -> Path:
        place = os.environ.get("PERSIA_DATA_DIR")
        if not place:
            pytest.skip("PERSIA_DATA_DIR is not set: no real data to read")
        if not (Path(place) / name / "data.parquet").is_file():
            pytest.fail(f"PERSIA_DATA_DIR is {place}, which has no {name}/data.parquet")
        return Path(place)

    return folder_with
