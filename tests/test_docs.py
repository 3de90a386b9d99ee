"""README and docs say what is there: files, tests, commands, options, examples."""

from __future__ import annotations

import csv
import importlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import results_page
import simulator_blocks

import persia_sim.__main__ as simulator
from experiments import __main__ as studies
from experiments.__main__ import BENCHES, STUDIES, module_of
from experiments.study_file import read_study
from persia_sim.cli.example import write_examples
from runtime import model_commands, train_options
from runtime.config import TrainConfig, read_config
from runtime.data.schema import read_schema
from runtime.hosts import resize
from runtime.hosts.launch import hosts
from runtime.preparing import download
from runtime.profiling import command as profiling
from tests.conftest import LAWS
from tests.house import texts, typed_numbers
from tests.tree import PACKAGES, ROOT

README = ROOT / "README.md"
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [
        README,
        ROOT / "CONTRIBUTING.md",
        ROOT / "ARTIFACT.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
}
COMMAND = r"\s*(?:python -m |persia-)(runtime|persia_sim|sim|experiments)\b(.*)"
EXAMPLE = re.compile("ahead[-_]sweep")
"""The study that docs/extend.md adds as an example."""


# Names of files, tests and links.


def mentioned(pattern: str) -> Iterator[tuple[str, str]]:
    for name, text in TEXTS.items():
        yield from ((name, found) for found in re.findall(pattern, text))


@cache
def functions(path: str) -> set[str]:
    return set(re.findall(r"^def (\w+)", (ROOT / path).read_text(), flags=re.M))


def test_every_file_that_a_text_names_is_there():
    pattern = rf"\b(?:{'|'.join(PACKAGES)}|tests|docs|notebooks)/[\w/]*[\w.]+\b"
    for text, path in mentioned(pattern):
        if not EXAMPLE.search(path):
            assert (ROOT / path).exists(), f"{text} names {path}"
    alone = {
        file.name
        for package in (*PACKAGES, "tests", "examples")
        for file in (ROOT / package).rglob("*.*")
    }
    for text, name in mentioned(r"`([A-Za-z_]\w*\.(?:py|cpp|hpp))`"):
        assert name in alone, f"{text} names {name}"


def test_every_test_that_a_text_names_is_there():
    for text, name in mentioned(r"tests/[\w/]+\.py::\w+"):
        path, function = name.split("::")
        assert function in functions(path), f"{text} names {name}"


def test_every_test_named_without_its_file_is_there():
    known = {f for p in (ROOT / "tests").rglob("*.py") for f in functions(str(p))}
    known |= {path.stem for path in (ROOT / "tests").rglob("*.py")}
    for text, name in mentioned(r"`(test_[^\W_]+_[^\W_]+_\w+)`"):
        assert name in known, f"{text} names {name}"


def test_every_law_has_tests_and_every_mark_of_a_test_a_law():
    laws = re.findall(r"^## (\d+)\.", TEXTS["docs/laws.md"], flags=re.M)
    assert laws == [str(law) for law in LAWS]
    marks = [
        found
        for path in (ROOT / "tests").rglob("test_*.py")
        for found in re.findall(r"^@pytest\.mark\.law(\d+)$", path.read_text(), flags=re.M)
    ]
    assert set(marks) == set(laws)


def test_every_link_leads_somewhere():
    for text, target in mentioned(r"\]\(([^)#]+)\)"):
        if not target.startswith("http"):
            assert ((ROOT / text).parent / target).exists(), f"{text} links to {target}"


# Commands and options.


class ParsedError(BaseException):
    """The real parser has taken a command line; nothing is carried out."""


def commands() -> list[tuple[str, ...]]:
    """Every `python -m MODULE ...` and `persia-COMMAND ...` of the texts, and those that made the
    stored tables, as words."""
    with (ROOT / "docs" / "results" / "index.csv").open(newline="") as file:
        found = [("experiments", *shlex.split(row["command"])[1:]) for row in csv.DictReader(file)]
    for text in TEXTS.values():
        lines = text.replace("\\\n", " ").splitlines()
        for code in [*re.findall(r"`([^`\n]+)`", text), *lines]:
            match = re.match(COMMAND, code)
            if match and not EXAMPLE.search(code):
                module = {"sim": "persia_sim"}.get(match[1], match[1])
                found.append((module, *shlex.split(match[2].partition(" > ")[0], comments=True)))
    return sorted(set(found))


def main_of(module: str):
    return importlib.import_module(f"{module}.__main__").main


def test_commands_are_found():
    modules = {command[0] for command in commands()}
    assert modules == {"runtime", "persia_sim", "experiments"}
    assert len(commands()) > 15


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_line_is_one_that_the_parser_takes(command, monkeypatch, tmp_path, capsys):
    def stop(parse):
        def parse_only(*args, **kwargs):
            parse(*args, **kwargs)
            raise ParsedError

        return parse_only

    module, *words = command
    if "--ray" in words:
        pytest.importorskip("ray", reason="needs the extra `cluster`")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(command))
    if words[:1] != ["init"]:  # which overwrites nothing
        given = shutil.ignore_patterns("runs")  # what a reader's own commands left there
        shutil.copytree(ROOT / "examples", tmp_path, dirs_exist_ok=True, ignore=given)
    if "my/cluster.toml" in words:
        write_examples(tmp_path / "my")
    monkeypatch.syspath_prepend(tmp_path)
    if "--resume" in words:
        run = Path(words[words.index("--resume") + 1])
        run.mkdir(parents=True)
        (run / "config.json").write_text('{"steps": 9}')
    if "--rows" in words:
        shutil.copytree(ROOT / "tests/experiments/examples", tmp_path, dirs_exist_ok=True)
        for name in (word for word in words if word.endswith(".csv")):
            (tmp_path / name).touch()  # what was measured elsewhere; only that it is there counts
    monkeypatch.setattr(train_options, "with_changes", stop(train_options.with_changes))
    for reader in (
        simulator,
        model_commands,
        profiling,
        download,
        hosts,
        resize,
        studies,
    ):
        monkeypatch.setattr(reader, "read_options", stop(reader.read_options))
    main = main_of(module)
    if words == ["list"]:
        assert main(words) == 0
        return
    if words[:1] == ["init"]:  # takes a folder and no option
        assert main() == 0
        return
    if "--help" in words:
        with pytest.raises(SystemExit, match="0"):
            main() if module == "persia_sim" else main(words)
        return
    with pytest.raises(ParsedError):
        main() if module == "persia_sim" else main(words)


def test_what_follows_init_in_a_text_names_the_files_that_it_wrote():
    for name, text in TEXTS.items():
        for block in re.findall(r"(?:^    .*\n)+", text, flags=re.M):
            if folder := re.search(r"persia-sim init (\w+)", block):
                named = re.findall(r"--(?:cluster|workload|model|system) (\S+\.toml)", block)
                wrong = [path for path in named if not path.startswith(f"{folder[1]}/")]
                assert named and not wrong, f"{name} goes on with {wrong}"


def options_of(module: str, words: list[str], monkeypatch, capsys) -> set[str]:
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setattr(sys, "argv", [module, *words, "--help"])
    every = ["all"] if words == ["train"] else []
    main = main_of(module)
    try:
        main() if module == "persia_sim" else main([*words, "--help", *every])
    except SystemExit as end:
        assert end.code == 0
    return set(re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out))


def test_every_option_that_a_text_names_is_one(monkeypatch, capsys):
    from torch.distributed.run import get_args_parser  # late: what torchrun takes

    known = {"--help", "--device", "--no-deps", "--head", "--address", "--port", "--resources"}
    known |= {option for a in get_args_parser()._actions for option in a.option_strings}
    names = "train", "profile", "evaluate", "predict", "export", "serve", "describe"
    for module, words in [
        *(("runtime", [name]) for name in names),
        ("persia_sim", []),
        ("persia_sim", ["sharded"]),
        ("persia_sim", ["size"]),
        ("persia_sim", ["machines"]),
    ]:
        known |= options_of(module, words, monkeypatch, capsys)
    for name in STUDIES | BENCHES:
        options = importlib.import_module(module_of(name)).Options
        for field, about in options.__dataclass_fields__.items():
            known.add(f"--{field.replace('_', '-')}")
            if about.type in (bool, "bool"):
                known.add(f"--no-{field.replace('_', '-')}")
    for text, option in mentioned(r"(?<![\w-])(--[a-z][\w.-]*\w)"):
        of_all_tables = re.sub(r"^--tables\.\w+\.", "--rows.", option)
        assert of_all_tables in known, f"{text} names {option}"


def test_every_make_target_that_a_text_names_is_there():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for text, target in mentioned(r"(?m)(?:`|^ {4}|^)make (\w+)(?=`|\n|  | [A-Z]+=)"):
        assert target in targets, f"{text} names make {target}"


# Examples and words.

PROGRAMS = {
    name: blocks
    for name, text in TEXTS.items()
    if (blocks := re.findall(r"```python\n(.*?)```", text, flags=re.S))
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_python_of_a_text_runs(name, monkeypatch, tmp_path, capsys):
    """The blocks of a page are one program."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    for block in PROGRAMS[name]:
        exec(compile(block, "example", "exec"), names)
        assert bool(capsys.readouterr().out.strip()) == ("print(" in block)


TOML = re.findall(r"```toml\n(.*?)```", "".join(TEXTS.values()), flags=re.S)


@pytest.mark.parametrize("block", TOML, ids=range(len(TOML)))
def test_the_toml_of_a_text_is_read(block, tmp_path):
    file = tmp_path / "example.toml"
    file.write_text(block)
    if "labels" in block:
        schema, _ = read_schema(file)
        assert [column.name for column in schema.columns][:2] == ["user", "item"]
    elif "[[line]]" in block:
        assert len(read_study(file, typed={"data.name": ["synthetic"]}).lines) > 1
    else:
        assert read_config(file) != TrainConfig()


@pytest.mark.parametrize("page", results_page.BLOCKS, ids=lambda page: page.stem)
def test_what_a_page_quotes_is_what_is_stored_and_printed(page):
    written = results_page.written(page)
    assert page.read_text() == written, "run: python docs/tools/results_page.py"


def test_few_numbers_are_typed_into_sentences():
    """A number that a command makes stands in a block that the command writes."""
    typed = {path.relative_to(ROOT): typed_numbers(text)[0] for path, text in texts().items()}
    assert sum(typed.values()) < 150, typed


_RANGED = r"at least [\d.,]+|[\d.,]+ \([\d.,]+ to [\d.,]+\)"
_HEADS = r"over sync's|Gbit/s"
"""Heads of columns with ratios."""
MEASURED_BESIDE = "claims"
"""A block in which each simulated ratio stands beside the measured one to which it was fitted."""


@pytest.mark.parametrize("page", results_page.BLOCKS, ids=lambda page: page.stem)
def test_no_ratio_of_a_generated_block_stands_without_its_range(page):
    for name in results_page.BLOCKS[page].keys() - {MEASURED_BESIDE}:
        start, end = f"<!-- {name} -->", f"<!-- end of {name.removeprefix('lateness: ')} -->"
        block = page.read_text().partition(start)[2].partition(end)[0]
        without_range(block)


def without_range(block: str) -> None:
    """Fails at a ratio that is no range: in a sentence, or in a column whose head says ratios."""
    lines = [line for line in block.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    for row in table[2:]:
        for head, cell in zip(table[0], row, strict=True):
            if re.search(_HEADS, head) and cell != "1":
                assert all(re.fullmatch(_RANGED, each) for each in cell.split(" / ")), row

    # Sentences: what stands before "times".
    prose = " ".join(line.strip() for line in block.splitlines() if not line.startswith("|"))
    for match in re.finditer(r"(\S+) times (?:as|the|less)\b", prose):
        before = prose[: match.end(1)]
        assert re.search(rf"(?:{_RANGED})$", before), before[-80:]


@pytest.mark.parametrize(
    "block",
    [
        "hybrid is 4.7 times as fast",
        "it costs 2.1 times less",
        "| mode | over sync's |\n| --- | --- |\n| hybrid | 4.72 |",
        "| GPU | 10 Gbit/s |\n| --- | --- |\n| A100 | 1.2 (1 to 2) / 3.1 |",
    ],
)
def test_a_ratio_without_its_range_is_found(block):
    with pytest.raises(AssertionError):
        without_range(block)
    without_range("it is at least 3.6 times as fast, and 4.7 (3.6 to 7.3) times as dear")


def test_ranges_hold_what_was_measured_in_eight_of_ten_cases():
    lines = simulator_blocks.held_table().splitlines()[2:]
    shares = [int(line.split("|")[3].strip().removesuffix(" %")) for line in lines]
    assert len(shares) == 5 and min(shares) >= 80


# The console scripts of pyproject.toml are the commands of `python -m`.

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
MODULES = {"persia-runtime": "runtime", "persia-sim": "persia_sim"}
MODULES["persia-experiments"] = "experiments"


def ended(*words: str) -> tuple[int, str, str]:
    found = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    return found.returncode, found.stdout, found.stderr


def test_there_is_a_script_for_every_command():
    assert set(SCRIPTS) == set(MODULES)


@pytest.mark.first_case
@pytest.mark.multiproc
@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("--no-such", 2)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_and_returns_what_python_m_does(script, word, code):
    module, _, function = SCRIPTS[script].partition(":")
    # What an installer writes into the script.
    text = f"import sys; from {module} import {function}; sys.exit({function}())"
    found = ended("-c", text, word)
    assert found[0] == code
    assert found == ended("-m", MODULES[script], word)


def test_the_readme_names_two_commands_that_install_before_anything_else():
    first_screen = (ROOT / "README.md").read_text().splitlines()[:60]
    makefile = (ROOT / "Makefile").read_text()
    for command in ("demo", "test"):
        assert any(line.strip().startswith(f"make {command} ") for line in first_screen), command
        assert re.search(rf"^{command}: install\b", makefile, re.MULTILINE), command
