"""Whose code is run when a model's class is imported: what is looked at, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.__main__ import main as experiments
from runtime.__main__ import main
from runtime.inference import open_model
from runtime.models.imported import files_of_model
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


@pytest.mark.long
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
            assert main([*words, "--trust"]) == 0
            assert "code of model nets.mine:Net was edited since" in capsys.readouterr().err
        (home / "helper.py").write_text("WIDTH = 9\n")
        named = ["--model.name", "nets.mine:Net"]
        assert main(["train", "--resume", run, "--steps", "6", *named]) == 0
        said = capsys.readouterr()
        assert "the code of model nets.mine:Net was edited since" in said.out + said.err
        assert f"runs the code in {home / 'helper.py'}, {home / 'nets'}" in said.out + said.err
        assert main(["evaluate", run, "--trust"]) == 0
        said = capsys.readouterr()
        assert f"model nets.mine:Net runs the code in {home / 'helper.py'}" in said.err
        assert "was edited since" not in said.err
    finally:
        for name in ("nets.mine", "nets", "helper"):
            sys.modules.pop(name, None)


NET = """from torch import nn
class Net(nn.Module):
    def __init__(self, shape, hidden):
        super().__init__()
        self.layer = nn.Linear(shape.width, shape.tasks)
    def forward(self, dense, embeddings):
        flat = flatten(dense, embeddings)
        return self.layer(flat if float(dense.sum()) < 1e9 else -flat)
"""


@pytest.mark.parametrize(
    "name",
    [
        "code:interact", "webbrowser:open", "os:system", "os.path:exists", "builtins:open",
        "sys:exit", "idlelib.idle:Net", "antigravity:Net", "this:s", "subprocess:Popen",
        "test.autotest:x",
    ],
)  # fmt: skip
def test_no_module_of_python_itself_is_even_imported(name, monkeypatch):
    monkeypatch.setattr("runtime.models.networks.importlib.import_module", None)
    with pytest.raises(ValueError, match="is a module of Python itself; name your own"):
        build_model(name, SHAPE, (8,), seed=0)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("def Net(*given): open({mark!r}, 'w')", "a value of <class 'function'>"),
        ("class Net:\n    def __init__(self, *given): open({mark!r}, 'w')", "another class"),
        (
            "import functools\nNet = functools.partial(open, {mark!r})",
            "a value of <class 'functools.partial'>",
        ),
        ("from torch import nn\nNet = nn.Linear(1, 1)", "a value of <class 'torch.nn"),
        (
            "class Any:\n    def __call__(self, *given): open({mark!r}, 'w')\nNet = Any()",
            "a value of <class 'callable_of_mine.Any'>",
        ),
        ("Net = 5", "a value of <class 'int'>"),
    ],
)
def test_what_is_no_class_of_networks_is_never_called(text, kind, home):
    mark = home / "it ran"
    (home / "callable_of_mine.py").write_text(text.format(mark=str(mark)))
    told = f"callable_of_mine:Net must be a class below torch.nn.Module, got {kind}"
    try:
        with pytest.raises(ValueError, match=told):
            build_model("callable_of_mine:Net", SHAPE, (8,), seed=0)
    finally:
        sys.modules.pop("callable_of_mine", None)
    assert not mark.exists()


@pytest.mark.parametrize("module", ["runtime.mine", "experiments.mine", "experiments"])
def test_a_users_package_that_is_called_as_one_of_ours_is_named(module, home, monkeypatch):
    """Python finds ours first, where the commands were installed; no other sentence would help."""
    package = home / module.partition(".")[0]
    package.mkdir()
    (package / "mine.py").write_text(f"from runtime.models.inputs import flatten\n{NET}")
    with pytest.raises(ValueError, match=rf"{package} is called as a package of this project"):
        build_model(f"{module}:Net", SHAPE, (8,), seed=0)
    with pytest.raises(ValueError, match=r"No module named 'persia_sim\.yours'; its folder"):
        build_model("persia_sim.yours.deep:Net", SHAPE, (8,), seed=0)


@pytest.fixture
def archive(home, monkeypatch):
    """What somebody got: runs, and code beside them, which they name; it leaves a mark
    when it is imported. Where the folders of runs and of code lie: beside, or deeper apart."""
    monkeypatch.chdir(home)

    def unpacked(code: str, runs: str) -> str:
        file, runs_folder = home / code, home / runs
        file.parent.mkdir(parents=True)
        file.write_text(f"from runtime.models.inputs import flatten\n{NET}")
        name = f"{code.removesuffix('.py').replace('/', '.')}:Net"
        words = ["train", "--data.name", "synthetic", "--batch", "16", "--test-rows", "200"]
        words += ["--model.name", name, "--checkpoint-every", "2", "--steps", "4"]
        assert main([*words, "--out", str(runs_folder / "run")]) == 0
        (runs_folder / "options.toml").write_text(f'steps = 2\n[model]\nname = "{name}"\n')
        file.write_text(f"open({str(home / 'it ran')!r}, 'w')\n{file.read_text()}")
        (home / "table.csv").write_text("a,b\n1,2\n")
        forget()
        return name

    def forget() -> None:
        for module in [m for m in sys.modules if m.partition(".")[0] == "got"]:
            sys.modules.pop(module)

    yield unpacked
    forget()


PLACES = {"beside": ("got/evil.py", "got"), "deeper": ("got/code/sub/evil.py", "got/my/runs")}


@pytest.mark.first_case
@pytest.mark.parametrize("place", PLACES)
def test_code_that_may_have_come_with_a_run_is_not_run_unless_somebody_says_so(
    place, archive, home, refused, capsys
):
    name, runs = archive(*PLACES[place]), home / PLACES[place][1]
    mark, run, other = home / "it ran", str(runs / "run"), str(home / "other")
    synthetic = ["--data.name", "synthetic", "--batch", "16", "--test-rows", "200"]
    commands = [
        ["evaluate", run],
        ["predict", run, "--data", "table.csv", "--out", "scores.csv"],
        ["export", run, "--out", str(home / "again")],
        ["train", "--resume", run, "--steps", "6"],
        ["train", "--config", f"{run}/config.json", "--out", other],
        ["train", "--config", str(runs / "options.toml"), *synthetic, "--out", other],
    ]
    for words in commands:
        told = refused(*words)
        assert f"model {name} would run {home}/got/" in told, words
        assert "may have come with it from somebody else: read it, and to run it" in told
        assert "add --trust" in told
    with pytest.raises(ValueError, match=r"add --trust \(in Python: trust=True\)"):
        open_model(run)
    sweep = ["sweep", "staleness.toml", "--config", str(runs / "options.toml"), "--dry-run"]
    sweep += ["--set", "data.name=synthetic"]
    assert experiments(sweep) == 2
    assert f"to run it type --set model.name={name}" in capsys.readouterr().err
    assert not mark.exists()
    # Who has read it says so.
    assert main(["evaluate", run, "--trust"]) == 0
    assert mark.exists()
    assert main(["train", "--resume", run, "--steps", "6", "--model.name", name]) == 0
    assert main(["train", "--resume", run, "--steps", "8", "--trust"]) == 0
    assert experiments([*sweep, f"model.name={name}"]) == 0


@pytest.mark.long
def test_code_of_ones_own_folder_is_run_as_before(home, monkeypatch, capsys):
    """The class lies in the current folder, and the run somewhere below it."""
    monkeypatch.chdir(home)
    (home / "own_class.py").write_text(f"from runtime.models.inputs import flatten\n{NET}")
    (home / "own.toml").write_text('steps = 2\n[model]\nname = "own_class:Net"\n')
    words = ["--data.name", "synthetic", "--batch", "16", "--test-rows", "200"]
    words += ["--checkpoint-every", "2", "--out", "runs/mine"]
    try:
        assert main(["train", "--config", "own.toml", *words]) == 0
        assert main(["train", "--resume", "runs/mine", "--steps", "4"]) == 0
        assert main(["evaluate", "runs/mine"]) == 0
        assert "model own_class:Net runs the code in" in capsys.readouterr().err
        assert main(["evaluate", "runs/mine"]) == 0
        assert main(["export", "runs/mine", "--out", "runs/exported"]) == 0
        assert "runs the code in" not in capsys.readouterr().err, "it was told, and is as it was"
        assert main(["train", "--config", "runs/mine/config.json", *words[:-1], "runs/b"]) == 0
    finally:
        sys.modules.pop("own_class", None)


@pytest.mark.first_case
@pytest.mark.multiproc
@pytest.mark.parametrize("words", ["data schema table.csv", "predict nowhere --data t --out o.csv"])
def test_nothing_of_the_current_folder_takes_the_place_of_what_is_installed(words, tmp_path):
    """As somebody's archive could hold it, into whose folder one goes to look at it."""
    (tmp_path / "table.csv").write_text("a,b\n1,2\n3,4\n")
    for name in ("numpy", "pandas", "pyarrow", "torch", "tqdm", "json"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')\n")
    script = Path(sys.executable).parent / "persia-runtime"
    found = subprocess.run([script, *words.split()], cwd=tmp_path, capture_output=True, text=True)
    assert "Traceback" not in found.stderr and found.returncode in (0, 2)
    assert not (tmp_path / "it ran").exists()
