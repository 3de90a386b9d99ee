"""Places that a run could not keep anything in, or that are not what they look like."""

from __future__ import annotations

import pytest

from persia_sim.base.files import atomic_write, unfinished_folder
from runtime import guarded
from runtime.__main__ import main
from runtime.object_store import by_url, cached_file, cached_files

WORDS = "train --data.name synthetic --steps 2 --batch 32 --test-rows 64 --model.hidden 8"


@pytest.mark.parametrize("option", ["--out", "--resume"])
@pytest.mark.parametrize("place", ["memory://x", "data:,x", "s3://", "dir::file:///x", "gs:/"])
def test_what_is_no_place_for_a_run_is_refused_before_it_trains(
    option, place, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS.split(), option, place]) == 2
    told = capsys.readouterr().err
    assert option in told and place.rstrip("/").split(":")[0] in told
    assert not list(tmp_path.iterdir())


def test_a_file_that_came_by_url_is_named_by_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "x.csv").write_text("a")
    url = f"file://{tmp_path}/x.csv"
    cached_file.cache_clear()
    file = cached_file(url)
    assert by_url(f"{file}, line 3: no") == f"{url}, line 3: no"

    def fail() -> None:
        raise ValueError(f"{file} has no header")

    assert guarded.guarded(fail) == 2
    assert f"error: {url} has no header" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["file:///dev/zero", "file:///proc/self"])
def test_a_url_of_no_file_is_told_so_at_once(url):
    with pytest.raises(ValueError, match=f"{url} is no file"):
        cached_files(url)


def test_an_error_without_a_number_keeps_its_text_and_a_full_disk_gets_a_name(tmp_path):
    for number, text in ((None, "the store is away"), (28, "No space left on device")):
        error = OSError(text) if number is None else OSError(number, text)
        with pytest.raises(OSError) as raised, unfinished_folder(tmp_path / "export"):
            raise error
        with pytest.raises(OSError) as again, atomic_write(tmp_path / "file"):
            raise OSError(*error.args)
        name = None if number is None else str(tmp_path / "export")
        assert raised.value.filename == name and text in str(raised.value)
        assert "None" not in str(again.value) and text in str(again.value)
