"""The site has every page, names of the API that are there, and a figure for each stored one."""

import importlib
import importlib.util
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from experiments.catalogue import BENCHES, STUDIES
from runtime.__main__ import COMMANDS as RUNTIME
from tests.tree import ROOT

spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs/site/build.py")
assert spec is not None and spec.loader is not None
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)

GENERATED = {"api", "options", "gallery"}
DATA_VERBS = ("list", "schema", "check", "get")


def test_every_page_and_notebook_stands_in_the_sidebar():
    listed = {page for pages in site.PAGES.values() for page in pages}
    there = {
        path.relative_to(ROOT).with_suffix("").as_posix()
        for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    }
    notebooks = {
        path.relative_to(ROOT).with_suffix("").as_posix()
        for path in (ROOT / "notebooks").glob("*.ipynb")
    }
    assert listed == there | GENERATED | notebooks


def test_what_the_api_names_is_there():
    for module, names in site.API.values():
        for name in names:
            assert getattr(importlib.import_module(module), name).__doc__


def test_the_gallery_has_every_stored_figure_with_its_command():
    text = site._gallery(STUDIES.values())
    for picture in (ROOT / "paper_figs/out").glob("*.png"):
        assert f"](paper_figs/out/{picture.name})" in text
    assert "    persia-experiments which-mode" in text


COMMANDS = [
    *(("runtime", name) for name in RUNTIME if name != "data"),
    *(("runtime", "data", verb) for verb in DATA_VERBS),
    *(("persia_sim", name) for name in ("sharded", "size", "init")),
    *(("experiments", name) for name, study in (STUDIES | BENCHES).items() if not study.file),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_site_has_the_options_of_every_command(command):
    assert command in {words[: len(command)] for words in site.COMMANDS}


def test_a_commands_help_is_that_of_its_parser():
    said = site.help_of("persia_sim", ["sharded"])
    assert said.startswith("usage: persia-sim sharded") and "--batch-per-gpu INT" in said
    assert site.help_of("runtime", ["train", "all"]).count("\n  --") > 80


class Page(HTMLParser):
    """What a page of the site names: its title, anchors, links and pictures."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.title = ""
        self.anchors = set[str]()
        self.links = list[str]()
        self.pictures = list[tuple[str, str]]()
        self._in_title = False
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "img":
            self.pictures.append((given["src"], given.get("alt", "")))
        self._in_title = tag == "title"

    def handle_data(self, data: str) -> None:
        if self._in_title and not self.title:
            self.title = data


def complaints(folder: Path) -> list[str]:
    """What is wrong with the pages of a built site, a line each."""
    pages = {file.resolve(): Page(file) for file in sorted(folder.rglob("*.html"))}
    found = []
    for file, page in pages.items():
        name = file.relative_to(folder.resolve())
        if not page.title.strip():
            found.append(f"{name} has no title")
        for source, says in page.pictures:
            if not (file.parent / unquote(source)).is_file():
                found.append(f"{name} shows {source}, which is not there")
            if not says:
                found.append(f"{name} says nothing in place of {source}")
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not target.is_file():
                found.append(f"{name} links to {link}, which is not there")
                continue
            anchor = unquote(parts.fragment)
            if target in pages and anchor and anchor not in pages[target].anchors:
                found.append(f"{name} links to {link}, which has no such place")
    return found


def test_what_is_wrong_with_a_page_is_said(tmp_path):
    (tmp_path / "a.html").write_text('<title></title><a href="b.html#no">x</a><img src="c.png">')
    (tmp_path / "b.html").write_text('<title>b</title><a href="d.html">x</a><p id="yes">y</p>')
    assert complaints(tmp_path) == [
        "a.html has no title",
        "a.html shows c.png, which is not there",
        "a.html says nothing in place of c.png",
        "a.html links to b.html#no, which has no such place",
        "b.html links to d.html, which is not there",
    ]


@pytest.mark.long
def test_the_site_builds_without_a_warning_and_every_link_leads_somewhere(tmp_path):
    pytest.importorskip("furo", reason="needs the extra `docs`")
    assert site.main(tmp_path) == 0
    html = tmp_path / "html"
    assert complaints(html) == []

    # Whatever the parsers take stands on the page of options, and each figure has its command.
    options = unescape((html / "options.html").read_text())
    for module, *words in site.COMMANDS:
        for option in re.findall(r"^  (--[\w.-]+)", site.help_of(module, words), flags=re.M):
            assert option in options, f"the site lacks {option} of {module} {' '.join(words)}"
    gallery = unescape((html / "gallery.html").read_text())
    for name, study in STUDIES.items():
        for picture in study.pictures:
            if (ROOT / "paper_figs/out" / picture).is_file():
                assert f"persia-experiments {name}" in gallery, f"the gallery lacks {name}"
                assert picture.removesuffix(".png") in gallery, f"the gallery lacks {picture}"
