"""A mistake in the user's own network is one sentence with type, text, file and line."""

from __future__ import annotations

import sys

import pytest

from runtime.__main__ import main
from runtime.models.networks import build_model
from tests.runtime.test_models import SHAPE

HEAD = """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, shape, hidden):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, dense, embeddings):
        pooled = embeddings.pooled.sum(1, keepdim=True)
"""
MADE = """from torch import nn
class Net(nn.Module):
    def __init__(self, shape, hidden):
        super().__init__()
"""
LINE = HEAD.count("\n") + 1
"""Of the first statement that a test adds to `forward`."""
CUT = """


class Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, slopes):
        raise LookupError("no way back")
"""
FORWARDS = {
    "raise KeyError('age')": f"failed in forward: KeyError: 'age' (FILE, line {LINE})",
    "return torch.ones(2, 3) @ pooled": f"failed in forward: RuntimeError: mat1 and FILE:{LINE}",
    "return None": "returned None, expected (8, 1): a tensor of floats, one logit per sample",
    "return self.layer(pooled), 1": "returned a tuple, expected (8, 1)",
    "return self.layer(pooled)[:, 0]": "returned logits of shape (8,), expected (8, 1)",
    "return (pooled > 0).long()": "returned logits of torch.int64, expected (8, 1)",
    "return pooled.detach()": "failed in the backward pass: RuntimeError: element 0 of tensors",
    "return Cut.apply(self.layer(pooled))": "failed in the backward pass: LookupError: no way back"
    f" (FILE, line {LINE + 11})",
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes own_net.py, found by imports; gives its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> str:
        sys.modules.pop("own_net", None)
        (tmp_path / "own_net.py").write_text(text)
        return str(tmp_path / "own_net.py")

    yield write
    sys.modules.pop("own_net", None)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = main(
        ["train", "--data.name", "synthetic", "--steps", "2", "--batch", "16", "--ranks", "2",
         "--out", "run", "--model.name", "own_net:Net", *words]
    )  # fmt: skip
    text = capsys.readouterr().err
    assert code == 2, text
    return text


@pytest.mark.parametrize("statement", FORWARDS)
def test_a_mistake_in_forward_keeps_type_text_file_and_line(statement, own, capsys):
    file = own(f"{HEAD}        {statement}\n{CUT}")
    text = told(capsys, "--executor", "concurrent")
    said = [line for line in text.splitlines() if line.startswith("error: ")]
    expected, _, line = FORWARDS[statement].partition(" FILE:")
    assert len(said) == 1
    assert f"model own_net:Net {expected.replace('FILE', file)}" in said[0]
    assert not line or said[0].endswith(f"({file}, line {line})")
    assert "Traceback" not in text


def test_the_line_is_the_users_also_where_torch_raised(own):
    """nn.Linear fails inside torch's files; the user looks for the line that called it."""
    file = own(f"{MADE}        self.layer = nn.Linear(\n            'wide', 1)\n")
    with pytest.raises(
        ValueError, match=r"cannot be made from .*TypeError: .*see runtime/models"
    ) as found:
        build_model("own_net:Net", SHAPE, (8,), seed=0)
    assert f"({file}, line 5)" in str(found.value)
    assert isinstance(found.value.__cause__, TypeError)


def test_packages_of_another_environment_are_libraries_too(own, tmp_path, monkeypatch):
    """As torch is where this project's environment builds upon one that has it."""
    library = tmp_path / "other" / "site-packages"
    library.mkdir(parents=True)
    (library / "own_library.py").write_text("def wide(shape):\n    raise KeyError('wide')\n")
    monkeypatch.syspath_prepend(library)
    file = own(f"import own_library\n{MADE}        own_library.wide(\n            shape)\n")
    with pytest.raises(ValueError, match=r"cannot be made from .*KeyError: 'wide'") as found:
        build_model("own_net:Net", SHAPE, (8,), seed=0)
    assert f"({file}, line 6)" in str(found.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import math\n\nSIZE = 1 / 0\n", "ZeroDivisionError: division by zero (FILE, line 3)"),
        ("import own_absent\n", "ModuleNotFoundError: No module named 'own_absent' (FILE, line 1)"),
        ("def f(:\n", "SyntaxError: invalid syntax (FILE, line 1)"),
        ("x = 1\n", "AttributeError: module 'own_net' has no attribute 'Net'; its folder"),
    ],
)
def test_a_file_that_fails_while_it_is_imported_is_told_with_its_line(text, said, own):
    file = own(text)
    with pytest.raises(ValueError, match="'own_net:Net' cannot be imported") as found:
        build_model("own_net:Net", SHAPE, (8,), seed=0)
    assert said.replace("FILE", file) in str(found.value)


def test_a_mistake_of_ours_within_the_users_backward_pass_is_not_blamed_on_him(own, monkeypatch):
    """The all-reduce hangs on hooks, which run inside that pass."""
    own(f"{HEAD}        return self.layer(pooled)\n")
    monkeypatch.setattr("runtime.dense.rules.sums_in_rank_order", None)
    words = ["--ranks", "2", "--mode", "hybrid", "--executor", "concurrent", "--out", "run"]
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        main(["train", "--data.name", "synthetic", "--steps", "1", "--model.name", "own_net:Net",
              *words])  # fmt: skip


def test_widths_beyond_memory_are_a_sentence():
    with pytest.raises(ValueError, match=r"model.hidden \(1000000, 1000000\) does not fit"):
        build_model("mlp", SHAPE, (1_000_000, 1_000_000), seed=0)


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("statement", "warned"),
    [
        ("return self.layer(pooled)", False),
        ("return self.layer(pooled - pooled.mean(0))", True),
        ("return self.layer(pooled) + torch.randn(len(pooled), 1)", True),
    ],
)
@pytest.mark.parametrize("executor", ["constant_lag", "concurrent"])
def test_a_network_whose_output_depends_on_its_batch_is_told(
    statement, warned, executor, own, tmp_path, capsys
):
    own(f"{HEAD}        pooled = 30 * pooled + dense.sum(1, keepdim=True)\n        {statement}\n")
    run = str(tmp_path / "run")
    words = "train --data.name synthetic --mode hybrid --steps 20 --test-rows 3000 --batch 64"
    kept = ["--checkpoint-every", "end", "--model.name", "own_net:Net", "--out", run]
    assert main([*words.split(), "--executor", executor, *kept]) == 0
    assert ("own_net:Net predicts a sample otherwise" in "".join(capsys.readouterr())) == warned
    assert main(["evaluate", run, "--trust"]) == 0
    assert ("own_net:Net predicts a sample otherwise" in "".join(capsys.readouterr())) == warned
    assert main(["export", run, "--trust", "--out", str(tmp_path / "exported")]) == 0
    assert ("own_net:Net predicts a sample otherwise" in "".join(capsys.readouterr())) == warned


@pytest.mark.first_case
@pytest.mark.parametrize("is_warned", [False, True])
def test_predict_tells_of_a_network_whose_output_depends_on_its_batch(
    is_warned, own, tmp_path, capsys
):
    place = " + torch.cumsum(torch.ones_like(pooled), 0) / 100" if is_warned else ""
    own(f"{HEAD}        return self.layer(pooled){place}\n")
    rows = "".join(f"{n // 60},{n * n % 7},{n % 3 % 2}\n" for n in range(600))
    (tmp_path / "log.csv").write_text(f"user,item,click\n{rows}")
    (tmp_path / "log.toml").write_text(
        'name = "log"\nfile = "log.csv"\nlabels = ["click"]\nsplit = { test_fraction = 0.2 }\n'
        'columns = ["user", "item"]\n'
    )
    words = "train --data log.toml --mode sync --data.epochs 3 --batch 32 --checkpoint-every end"
    assert main([*words.split(), "--model.name", "own_net:Net", "--out", "run"]) == 0
    assert main(["export", "run", "--trust", "--out", "exported"]) == 0
    capsys.readouterr()
    for model in ("run", "exported"):
        words = f"predict {model} --trust --data log.csv --out {model}.csv"
        assert main(words.split()) == 0
        said = "".join(capsys.readouterr())
        assert ("own_net:Net predicts a sample otherwise" in said) == is_warned
