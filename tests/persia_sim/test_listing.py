"""Names that files and options accept are listed with prices and sources, and each is accepted."""

from __future__ import annotations

import sys

import pytest

from persia_sim.__main__ import main
from persia_sim.presets.catalogue import CLUSTERS, MACHINES, workloads
from persia_sim.sharded.presets import rankers


def _printed(words: str, monkeypatch, capsys) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["persia-sim", *words.split()])
    code = main()
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("what", "names"),
    [("machines", MACHINES), ("clusters", CLUSTERS), ("workloads", [*workloads(), *rankers()])],
)
def test_every_name_has_a_line_with_its_source(what, names, monkeypatch, capsys):
    code, out, _ = _printed(f"{what} list", monkeypatch, capsys)
    header, *lines = out.splitlines()
    assert code == 0 and header.endswith("source")
    assert len(lines) == len(names)
    place = header.index("source")
    for name, line in zip(names, lines, strict=True):
        assert line.startswith(f"{name} ") and line[place:].strip(), name
    assert out == _printed(what, monkeypatch, capsys)[1], "`list` may be left out"


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("h100", {"dgx-h100", "p5.48xlarge"}),
        ("a100-40", {"p4d.24xlarge", "a2-highgpu-8g"}),
        ("A100", {"dgx-a100", "p4d.24xlarge", "nd96amsr-a100-v4", "a2-highgpu-8g"}),
        ("cpu", {"2 x E5-2680 v4", "c2-standard-30", "m2-ultramem-416"}),
    ],
)
def test_machines_of_one_gpu_are_listed_alone(asked, names, monkeypatch, capsys):
    _, out, _ = _printed(f"machines list --gpu {asked}", monkeypatch, capsys)
    assert {line.split("  ")[0] for line in out.splitlines()[1:]} == names


def test_a_machine_says_its_price_and_when_it_was_that(monkeypatch, capsys):
    _, out, _ = _printed("machines list --gpu h100", monkeypatch, capsys)
    (line,) = (line for line in out.splitlines() if line.startswith("p5.48xlarge"))
    assert " 98.32 " in line and "2023-08" in line and "8 x H100-SXM5-80GB" in line
    (line,) = (line for line in out.splitlines() if line.startswith("dgx-h100"))
    assert " unknown " in line and "no list price" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("machines --gpu tpu", "--gpu is 'tpu': no machine has it; name one of v100, a100-40"),
        ("machines --gpu a10", "--gpu is 'a10': no machine has it; name one of v100, a100-40"),
        ("clusters list --gpu h100", "--gpu is no option"),
        ("workloads lost", "'lost' is no option and no value"),
    ],
)
def test_what_cannot_be_listed_is_one_sentence(words, said, monkeypatch, capsys):
    code, out, err = _printed(words, monkeypatch, capsys)
    assert (code, out) == (2, "") and err.startswith("error: ") and said in err
