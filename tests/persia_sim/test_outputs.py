"""What a command writes takes the place of nothing but an earlier file of its kind."""

from __future__ import annotations

import gzip
import os
import socket
import stat
import sys
from pathlib import Path

import pytest

from persia_sim import __main__ as command
from persia_sim.base.files import atomic_write
from persia_sim.base.trace import Trace

RUN = ["--cluster", "this-host", "--workload", "taobao-ad", "--row-format", "f32-adagrad",
       "--steps", "20"]  # fmt: skip
OUTPUTS = {"--write-trace": "trace.npz", "--write-timeline": "timeline.json"}
ZERO = (1, 5)
"""Major and minor number of a device that can be read for ever, /dev/zero."""


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(*ZERO))
    except PermissionError:
        pytest.skip("only root can make a device")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's name has 108 bytes at most
        try:
            sock.bind(path.name)
        finally:
            os.chdir(before)


def a_link(path: Path) -> None:
    (path.parent / "target").write_bytes(b"")
    path.symlink_to(path.parent / "target")


THERE = {
    "a device": device,
    "a named pipe": os.mkfifo,
    "a socket": a_socket,
    "a link": a_link,
    "a folder": os.mkdir,
}


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> str:
    """What is said before anything is simulated."""
    monkeypatch.setattr("persia_sim.report.measure.simulate", None)  # a call is a traceback
    monkeypatch.setattr(sys, "argv", ["persia_sim", *RUN, *map(str, words)])
    assert command.main() == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize("kind", THERE)
@pytest.mark.parametrize("option", OUTPUTS)
def test_what_is_no_regular_file_stays_as_it_is(option, kind, tmp_path, monkeypatch, capsys):
    place = tmp_path / OUTPUTS[option]
    THERE[kind](place)
    before = place.lstat()
    assert f"{option} is {place}: it is {kind}; name" in refused(monkeypatch, capsys, option, place)
    assert (place.lstat().st_ino, place.lstat().st_mode) == (before.st_ino, before.st_mode)


@pytest.mark.parametrize("option", OUTPUTS)
def test_a_file_of_another_kind_is_not_lost(option, tmp_path, monkeypatch, capsys):
    """The inputs of the call among them, and what the other options have written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["persia_sim", "init"])
    assert command.main() == 0
    words = [word for own in OUTPUTS.items() if own[0] != option for word in own]
    monkeypatch.setattr(sys, "argv", ["persia_sim", *RUN, *words])
    assert command.main() == 0
    capsys.readouterr()
    (tmp_path / "empty.npz").write_bytes(b"PK\5\6" + bytes(18))  # a zip archive without a file
    (tmp_path / "list.json").write_text("[]")
    for place in tmp_path.iterdir():
        before = place.read_bytes()
        told = refused(monkeypatch, capsys, option, place.name)
        assert f"{option} is {place.name}: it is a file, and no " in told
        assert "would be lost" in told
        assert place.read_bytes() == before


@pytest.mark.parametrize("option", [*OUTPUTS, "--write-timeline.gz"])
def test_an_earlier_file_of_its_kind_is_replaced(option, tmp_path, monkeypatch, capsys):
    option, _, packed = option.partition(".")
    place = tmp_path / (OUTPUTS[option] + (f".{packed}" if packed else ""))
    for seed in ("1", "2"):
        words = ["persia_sim", *RUN, "--gpu-cv", "0.3", "--seed", seed, option, str(place)]
        monkeypatch.setattr(sys, "argv", words)
        assert command.main() == 0
        if seed == "1":
            first = place.read_bytes()
    assert place.read_bytes() != first
    if option == "--write-trace":
        assert len(Trace.load(place))
    if packed:
        assert gzip.decompress(place.read_bytes()).startswith(b'{"traceEvents": [')


def test_two_outputs_are_two_files(tmp_path, monkeypatch, capsys):
    (tmp_path / "sub").mkdir()
    place, other = tmp_path / "x", tmp_path / "sub" / ".." / "x"
    told = refused(monkeypatch, capsys, "--write-timeline", place, "--write-trace", other)
    assert f"--write-trace is {other}: --write-timeline names the same file; name another" in told
    assert not place.exists()


@pytest.mark.parametrize("kind", [kind for kind in THERE if kind != "a link"])
def test_no_file_ever_takes_the_place_of_what_is_none(kind, tmp_path):
    """Whoever writes, and whatever was looked at before; also where a link leads there."""
    place = tmp_path / "there"
    THERE[kind](place)
    (tmp_path / "link").symlink_to(place)
    before = sorted(tmp_path.iterdir())
    for path in (place, tmp_path / "link"):
        told = rf"{kind}, whose place no file takes"
        with pytest.raises(OSError, match=told), atomic_write(path) as file:
            file.write(b"new")
    assert sorted(tmp_path.iterdir()) == before
    assert not stat.S_ISREG(place.stat().st_mode) and (tmp_path / "link").is_symlink()
