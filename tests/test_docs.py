"""README and docs say what is there: files, tests, commands, options, examples."""

from __future__ import annotations

import ast
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

import numpy as np
import pytest

import persia_sim.__main__ as simulator
from experiments import __main__ as studies
from experiments.__main__ import BENCHES, STUDIES, module_of
from persia_sim.base.command_line import options_of as options_of_record
from persia_sim.cli import Options as SimOptions
from persia_sim.cli.example import write_examples
from persia_sim.cli.sharded import ShardedOptions
from persia_sim.cli.size import SizeOptions
from persia_sim.presets.catalogue import gcp_100t, workloads
from runtime import model_commands, resize, train_options
from runtime.config import TrainConfig, read_config
from runtime.data import download
from runtime.data.schema import read_schema
from runtime.engines.launch import hosts
from runtime.train_options import Train
from tests.conftest import LAWS
from tests.tree import PACKAGES, ROOT, sentence, sources

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


def folders_of_the_tree() -> dict[str, str]:
    """Folder -> what the tree of CONTRIBUTING says of it, lines joined."""
    block = (ROOT / "CONTRIBUTING.md").read_text().split("## The tree")[1].split("```")[1]
    found: dict[str, str] = {}
    stack: list[str] = []
    here: list[str] = []
    for line in block.splitlines():
        start = re.match(r"( *)((?:[\w/]+/,? )+) *(.*)", line + " ")
        if start:
            depth = len(start[1]) // 2
            names = re.findall(r"([\w/]+)/", start[2])
            here = ["/".join([*stack[:depth], name]) for name in names]
            # Below two folders of one line stands what belongs to the last.
            stack[depth:] = names[-1].split("/")
            line = start[3]
        for folder in here:
            found[folder] = f"{found.get(folder, '')} {line.strip()}"
    return found


FOLDERS = folders_of_the_tree()


def test_the_tree_says_something_of_every_folder_with_sources():
    for folder in sorted({file.parent.relative_to(ROOT).as_posix() for file in sources()}):
        assert FOLDERS.get(folder, "").strip(), f"the tree lacks {folder}/"


def test_the_tree_names_no_folder_that_is_not_there():
    for folder in FOLDERS:
        assert (ROOT / folder).is_dir(), f"the tree names {folder}/"


def test_the_tree_names_every_top_folder():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert {*packages, "notebooks", "docs"} <= set(FOLDERS)


def test_every_source_file_says_what_it_is():
    said: dict[Path, str] = {}  # a header and its .cpp speak with one voice
    for file in sources():
        said[file.with_suffix("")] = said.get(file.with_suffix(""), "") + sentence(file)
    assert not [path for path, words in said.items() if not words]


# Names of files, tests and links.


def mentioned(pattern: str) -> Iterator[tuple[str, str]]:
    for name, text in TEXTS.items():
        yield from ((name, found) for found in re.findall(pattern, text))


@cache
def functions(path: str) -> set[str]:
    nodes = ast.parse((ROOT / path).read_text()).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


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
            main(words)
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
    with pytest.raises(SystemExit) as end:
        main() if module == "persia_sim" else main([*words, "--help", *every])
    assert end.value.code == 0
    return set(re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out))


def test_every_option_that_a_text_names_is_one(monkeypatch, capsys):
    from torch.distributed.run import get_args_parser  # late: what torchrun takes

    known = {"--help", "--device", "--no-deps", "--head", "--address", "--port", "--resources"}
    known |= {option for a in get_args_parser()._actions for option in a.option_strings}
    names = "train", "profile", "evaluate", "predict", "export", "serve"
    for module, words in [
        *(("runtime", [name]) for name in names),
        ("persia_sim", []),
        ("persia_sim", ["sharded"]),
        ("persia_sim", ["size"]),
        ("persia_sim", ["machines"]),
    ]:
        known |= options_of(module, words, monkeypatch, capsys)
    for record, _, _ in studies.RUNS_COMMANDS.values():
        known |= {f"--{option.name}" for option in options_of_record(record)}
    for name in STUDIES | BENCHES:
        options = importlib.import_module(module_of(name)).Options
        for field, about in options.__dataclass_fields__.items():
            known.add(f"--{field.replace('_', '-')}")
            if about.type in (bool, "bool"):
                known.add(f"--no-{field.replace('_', '-')}")
    for text, option in mentioned(r"(?<![\w-])(--[a-z][\w.-]*\w)"):
        of_all_tables = re.sub(r"^--tables\.\w+\.", "--rows.", option)
        assert of_all_tables in known, f"{text} names {option}"


@pytest.mark.parametrize("record", [Train, SimOptions, ShardedOptions, SizeOptions])
def test_every_option_stands_in_a_text(record):
    texts = "".join(TEXTS.values())
    for option in filter(lambda option: option.is_taken, options_of_record(record)):
        leaf = re.escape(option.name.rpartition(".")[2])
        named = re.search(rf"--(?:[\w-]+\.)*(?:no-)?{leaf}(?![\w-])", texts)
        assert named, f"no text says when to use --{option.name}"


def test_every_make_target_that_a_text_names_is_there():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for text, target in mentioned(r"(?m)(?:`|^ {4}|^)make (\w+)(?=`|\n|  | [A-Z]+=)"):
        assert target in targets, f"{text} names make {target}"


# Examples and words.

BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name, text in TEXTS.items()
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, flags=re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_python_of_a_text_runs(block, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "example", "exec"), {"__name__": "example"})
    assert bool(capsys.readouterr().out.strip()) == ("print(" in block)


TOML = re.findall(r"```toml\n(.*?)```", "".join(TEXTS.values()), flags=re.S)


@pytest.mark.parametrize("block", TOML, ids=range(len(TOML)))
def test_the_toml_of_a_text_is_read(block, tmp_path):
    file = tmp_path / "example.toml"
    file.write_text(block)
    if "labels" in block:
        schema, _ = read_schema(file)
        assert [column.name for column in schema.columns][:2] == ["user", "item"]
    else:
        assert read_config(file) != TrainConfig()


OTHER_WORDS = re.compile(r"\b(?:towers?|cards?|workload W)\b")


@pytest.mark.parametrize("name", TEXTS)
def test_texts_say_nic_and_mlp(name):
    assert not (found := OTHER_WORDS.findall(TEXTS[name])), f"{name} says {found}"


def test_helps_and_messages_say_nic_and_mlp():
    for file in [f for f in sources() if f.suffix == ".py"]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found = OTHER_WORDS.findall(node.value)
                assert not found, f"{file.relative_to(ROOT)}:{node.lineno} says {found}"


def test_the_defaults_of_the_words_are_those_of_a_run():
    config = TrainConfig()
    groups = [config, config.sync, config.engine, config.evaluation]
    said = re.findall(r"\| ([^|]*) \| `--([a-z-]+)`", TEXTS["docs/words.md"])
    assert {option for _, option in said} >= {"tau", "ahead", "batch", "permits", "merge-pushes"}
    for default, option in said:
        name = option.replace("-", "_")
        value = next(getattr(group, name) for group in groups if hasattr(group, name))
        meant = {None: "unlimited", True: "merged"}.get(value, str(value))
        assert default.split()[0].rstrip(",") == meant, f"--{option}: {default} against {value}"
    assert (
        f"| {config.sync.average_every_s} s, {config.sync.average_every_steps} steps |"
        in (TEXTS["docs/words.md"])
    )


def stored(name: str) -> list[dict[str, str]]:
    with (ROOT / "docs" / "results" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def cells_of(row: str) -> list[str]:
    line = next(x for x in TEXTS["docs/simulator.md"].splitlines() if x.startswith(f"| {row} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


WORKERS, SIZES = stored("scale_workers"), stored("scale_model_size")
KWAI = [r for r in WORKERS if r["series"].startswith("kwai")]
ERRORS = {
    "Persia on Taobao and Avazu, 1-8 GPUs": [
        r
        for r in WORKERS
        if r["series"].endswith("ad Persia hybrid") and r["published"] and "half" not in r["note"]
    ],
    "XDL and PaddlePaddle, 1-8 GPUs": [
        r
        for r in WORKERS
        if r["series"].startswith(("taobao", "avazu")) and "Persia" not in r["series"]
    ],
    "Kwai, 8-64 GPUs": [r for r in KWAI if int(r["gpus"]) >= 8],
    "Kwai, 1 and 4 GPUs": [r for r in KWAI if int(r["gpus"]) < 8],
    "100T cluster, hybrid, 6.25-100 T parameters": [
        r for r in SIZES if r["series"].endswith("hybrid")
    ],
    "100T cluster, sync and async_averaging (the paper's async), 100 T parameters": [
        r for r in SIZES if not r["series"].endswith("hybrid")
    ],
}


@pytest.mark.parametrize("row", ERRORS)
def test_the_errors_of_the_simulators_text_are_those_of_the_stored_tables(row):
    errors = [100 * abs(float(r["model"]) / float(r["published"]) - 1) for r in ERRORS[row]]
    _, points, _, *found = cells_of(row)
    mean, largest = (float(cell.removesuffix(" %")) for cell in found)
    assert int(points.split()[0]) == len(errors)
    assert mean == pytest.approx(sum(errors) / len(errors), abs=0.051 if mean < 10 else 0.51)
    assert largest == pytest.approx(max(errors), abs=0.051 if largest < 40 else 0.51)


def test_the_screen_of_the_simulators_text_is_what_its_command_prints(monkeypatch, capsys):
    text = TEXTS["docs/simulator.md"]
    command = re.search(r"## The screen\n\n    persia-sim (.*)\n", text)
    assert command
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", ["persia-sim", *shlex.split(command[1])])
    assert simulator.main() == 0
    shown = re.search(r"<!-- screen -->\n```\n(.*?)```\n<!-- end of screen -->", text, flags=re.S)
    assert shown and shown[1] == capsys.readouterr().out


def test_the_busiest_server_has_as_many_more_ids_as_the_text_says():
    work, servers = workloads()["criteo-syn5"], gcp_100t().servers.processes
    most = work.sent_ids * work.server_shares(servers).max() + work.busiest_extra(servers)
    found = re.search(r"busiest server \((\d+) % more", TEXTS["docs/simulator.md"])
    assert found and int(found[1]) == round(100 * (most / work.sent_ids * servers - 1))


LEFT_OUT = {
    "Taobao": "taobao-ad hybrid", "Avazu": "avazu-ad hybrid", "the 100T cluster": "criteo-syn",
    "Kwai in hybrid": "kwai-video hybrid", "Kwai in async_averaging": "kwai-video async_averaging",
    "all of Kwai; only the fitted size of its batch was kept": "kwai-video",
    "all points with several GPU hosts": "several hosts", "all points in sync": "sync",
}  # fmt: skip


@pytest.mark.parametrize("row", LEFT_OUT)
def test_the_errors_of_what_is_left_out_are_those_of_the_stored_table(row):
    lines = [line for line in stored("persia_left_out") if line["left_out"] == LEFT_OUT[row]]
    errors = np.abs([float(line["ln_rate_error"]) for line in lines])
    nearest = np.abs([float(line["naive_ln_rate_error"]) for line in lines])
    expected = np.median(errors), np.quantile(errors, 0.9), np.median(nearest)
    points, *shares = (float(cell.strip("* ").split()[0]) for cell in cells_of(row)[1:])
    assert points == len(lines)
    assert shares == pytest.approx([100 * np.expm1(x) for x in expected], abs=0.51)


@pytest.mark.parametrize("system", ["Persia hybrid", "PaddlePaddle heter", "XDL async"])
def test_the_prediction_of_criteo_is_that_of_the_stored_table(system):
    name, *cells = cells_of(system)
    for gpus, cell in zip((1, 2, 4, 8), cells, strict=True):
        said = {int(number.replace(",", "")) for number in re.findall(r"\d[\d,]{3,}", cell)}
        rows = [r for r in stored("scale_workers") if r["series"] == f"criteo-ad {name}"]
        assert said == {round(float(r["model"])) for r in rows if int(r["gpus"]) == gpus}


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
