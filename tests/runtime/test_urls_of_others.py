"""A URL that came with a run, in a schema beside it, is asked only where somebody says so."""

from __future__ import annotations

import shutil

import pytest

from runtime.__main__ import main
from runtime.object_store import Store, cached_file

ROWS = "".join(f"{n % 7},{n % 5},{n % 3 % 2}\n" for n in range(400))
SCHEMA = """name = "log"
file = "{file}"
labels = ["click"]
split = {{ test_fraction = 0.2 }}
columns = ["user", "item"]
"""


@pytest.fixture
def received(tmp_path, monkeypatch):
    """A folder that somebody sent: a run, and beside it its schema, which names a URL."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "theirs").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.csv").write_text(f"user,item,click\n{ROWS}")
    schema = tmp_path / "theirs" / "log.toml"
    schema.write_text(SCHEMA.format(file=f"file://{tmp_path}/log.csv"))
    words = "train --data theirs/log.toml --mode sync --batch 32 --model.hidden 8 --steps 5"
    assert main([*words.split(), "--checkpoint-every", "end", "--out", "theirs/run"]) == 0
    cached_file.cache_clear()  # another process asks anew
    return tmp_path


@pytest.mark.parametrize(
    "words",
    ["evaluate theirs/run", "train --resume theirs/run --steps 8",
     "train --config theirs/run/config.json --out mine"],
)  # fmt: skip
def test_a_url_that_may_have_come_with_a_run_is_asked_only_on_trust(
    words, received, monkeypatch, capsys
):
    asked = []
    info = Store.info
    monkeypatch.setattr(Store, "info", lambda *given: asked.append(given) or info(*given))
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert f"names the URL file://{received}/log.csv" in said and "--trust" in said
    assert not asked

    assert main([*words.split(), "--trust"]) == 0
    assert asked


def test_a_schema_of_ones_own_elsewhere_may_name_a_url(received):
    shutil.move("theirs/run", "run")
    shutil.move("theirs/log.toml", "log.toml")
    (received / "theirs").rmdir()
    assert main(["evaluate", "run", "--data", "log.toml"]) == 0
