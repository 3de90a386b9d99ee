"""Whose code is run when a model's class is imported: what is looked at, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runtime.__main__ import main
from runtime.inference import open_model
from runtime.models.imported import files_of_model, refuse_code_in
from runtime.models.networks import build_model
from tests.runtime.test_own_model import SHAPE


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's folder: a package, a helper of each way to import one, and what is nobody's."""
    sources = {
        "nets/__init__.py": "",
        "nets/mine.py": "import torch, json, runtime.stop\nfrom . import near\nfrom .far import a\n"
        "import helper as h\ndef make(*a):\n    from space.inner import deep\n",
        "nets/near.py": "from ..nets import sibling\nimport nets.mine\n",
        "nets/far.py": "from nowhere import a\nfrom missing.module import b\na = 1\n",
        "nets/sibling.py": "",
        "nets/unused.py": "",
        "helper.py": "from lib import *\nthis is no Python\n",
        "lib.py": "",
        "space/inner/deep.py": "import json.decoder\n",
        "site-packages/installed.py": "",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def below(home: Path, name: str) -> set[str]:
    return {str(file.relative_to(home)) for file in files_of_model(name).values()}


def test_all_that_the_users_folders_give_to_an_import_is_found_and_nothing_else(home):
    (home / "helper.py").write_text("from lib import *\nfrom installed import x\n")
    sys.path.append(str(home / "site-packages"))
    try:
        found = below(home, "nets.mine:Net")
    finally:
        sys.path.remove(str(home / "site-packages"))
    assert found == {
        "nets/__init__.py", "nets/mine.py", "nets/near.py", "nets/far.py", "nets/sibling.py",
        "helper.py", "lib.py", "space/inner/deep.py",
    }  # fmt: skip
    assert not {name for name in sys.modules if name.partition(".")[0] in ("nets", "helper")}


def test_a_file_that_is_no_python_counts_and_is_not_looked_into(home):
    assert below(home, "helper:Net") == {"helper.py"}
    assert files_of_model("ffnn") == files_of_model("no.such.module:Net") == {}
    (project,) = [f for f in files_of_model("runtime.models.networks:FeedForward").values()
                  if f.name != "__init__.py"]  # fmt: skip
    assert project.name == "networks.py"


@pytest.mark.parametrize(
    "signs",
    [("config.json", "checkpoints/0/state.json"), ("state.json", "dense.pt"),
     ("manifest.json", "rows/rows.parquet")],
)  # fmt: skip
@pytest.mark.parametrize("inside", ["evil.py", "deeper/evil.py", "__init__.py"])
def test_code_inside_the_folder_of_a_run_or_an_export_is_never_run(home, signs, inside):
    where = f"got/run/{inside}"
    for name in signs:
        (home / "got/run" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "got/run" / name).write_text("{}")
    mark = home / "it ran"
    (home / where).parent.mkdir(parents=True, exist_ok=True)
    (home / where).write_text(f"open({str(mark)!r}, 'w')\ndef Net(*a): pass\n")
    name = where.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".") + ":Net"
    with pytest.raises(ValueError, match="got/run, the folder of a run or of an export: code"):
        build_model(name, SHAPE, (8,), seed=0)
    (home / "mine.py").write_text(f"from {name.partition(':')[0]} import Net\n")
    with pytest.raises(ValueError, match="code is never taken from there"):
        build_model("mine:Net", SHAPE, (8,), seed=0)
    assert not mark.exists()


def test_code_inside_the_folder_that_is_read_is_refused_whatever_it_looks_like(home):
    (home / "plain").mkdir()
    (home / "plain" / "evil.py").write_text("")
    (home / "linked.py").symlink_to(home / "plain" / "evil.py")
    for name in ("plain.evil:Net", "linked:Net"):
        told: list[str] = []
        refuse_code_in(None, name, told.append)
        file = home / f"{name.removesuffix(':Net').replace('.', '/')}.py"
        assert told == [f"model {name} runs the code in {file}"]
        with pytest.raises(ValueError, match=r"would run .*evil\.py|would run .*linked\.py"):
            refuse_code_in(home / "plain", name)
    refuse_code_in(home / "plain", "helper:Net")


def test_a_run_of_edited_code_is_told_and_its_trace_is_not_replayed(home, capsys):
    code = (
        "from torch import nn\nfrom helper import WIDTH\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, shape, hidden):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(shape.width, shape.tasks)\n"
        "    def forward(self, dense, embeddings):\n"
        "        flat = flatten(dense, embeddings)\n"
        "        return self.layer(flat if float(dense.sum()) < 1e9 else -flat)\n"  # no program
    )
    (home / "nets" / "mine.py").write_text("from runtime.models.inputs import flatten\n" + code)
    (home / "helper.py").write_text("WIDTH = 8\n")
    run = str(home / "run")
    words = ["train", "--data.name", "synthetic", "--batch", "16", "--test-rows", "200"]
    words += ["--model.name", "nets.mine:Net"]
    try:
        assert main([*words, "--steps", "4", "--checkpoint-every", "2", "--out", run]) == 0
        replay = [*words, "--steps", "4", "--executor", "replay", "--trace", f"{run}/trace.npz"]
        assert main([*replay, "--out", str(home / "same")]) == 0
        (home / "helper.py").write_text("WIDTH = 9\n")
        assert main([*replay, "--out", str(home / "other")]) == 2
        assert "model_code: trace '" in capsys.readouterr().err
        for words in (["evaluate", run], ["export", run, "--out", str(home / "exported")]):
            assert main(words) == 0
            assert "code of model nets.mine:Net was edited since" in capsys.readouterr().err
        told: list[str] = []
        assert open_model(home / "exported", told.append).layout.fields
        assert "the code of model nets.mine:Net was edited since" in told[-1]
        (home / "helper.py").write_text("WIDTH = 8\n")
        again: list[str] = []
        open_model(home / "exported", again.append)
        assert len(told) == 2 and again == told[:1]
        (home / "helper.py").write_text("WIDTH = 9\n")
        assert main(["train", "--resume", run, "--steps", "6"]) == 0
        said = capsys.readouterr()
        assert "the code of model nets.mine:Net was edited since" in said.out + said.err
        assert f"runs the code in {home / 'helper.py'}, {home / 'nets'}" in said.out + said.err
        assert main(["evaluate", run]) == 0
        said = capsys.readouterr()
        assert f"model nets.mine:Net runs the code in {home / 'helper.py'}" in said.err
        assert "was edited since" not in said.err
    finally:
        for name in ("nets.mine", "nets", "helper"):
            sys.modules.pop(name, None)
