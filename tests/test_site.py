"""The site has every page, names of the API that are there, and a figure for each stored one."""

import importlib
import importlib.util

import pytest

from experiments.catalogue import STUDIES
from tests.tree import ROOT

spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs/site/build.py")
assert spec is not None and spec.loader is not None
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)

GENERATED = {"api", "options", "gallery"}


def test_every_page_of_the_docs_stands_in_the_sidebar():
    listed = {page for pages in site.PAGES.values() for page in pages}
    there = {
        path.relative_to(ROOT).with_suffix("").as_posix()
        for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    }
    assert listed == there | GENERATED


def test_what_the_api_names_is_there():
    for module, names in site.API.values():
        for name in names:
            assert getattr(importlib.import_module(module), name).__doc__


def test_the_gallery_has_every_stored_figure_with_its_command():
    text = site._gallery(STUDIES.values())
    for picture in (ROOT / "paper_figs/out").glob("*.png"):
        assert f"](paper_figs/out/{picture.name})" in text
    assert "    persia-experiments which-mode" in text


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("furo", reason="needs the extra `docs`")
    assert site.main(tmp_path) == 0
    assert (tmp_path / "html" / "options.html").is_file()
