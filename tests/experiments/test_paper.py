"""The report: pieces run once and again only where needed, failures told, the page whole."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest

from experiments.__main__ import main, module_of
from experiments.catalogue import PIECES, SECTIONS, STUDIES, Study, chosen, measured
from experiments.paper import record
from experiments.paper.claims import claims
from experiments.paper.page import OF_PLOTS, WORDS, Report, described, summary, write_report
from experiments.paper.record import COLUMNS, store
from experiments.studies.paper import missing, run_pieces
from tests import browser

GOOD = Study(
    name="simulator-speed",
    says="-",
    minutes=1,
    section="Throughput",
    title="Speed & <size>",
    caption="What is read.",
)
QUICK = ("--most-ranks", "8", "--steps", "8", "--closed-forms", "1")
BAD = Study(name="scale-workers", says="-", minutes=1, section="Throughput", title="Bad",
            caption="-", draws=False)  # fmt: skip
NEVER = replace(BAD, name="demo", title="Never")
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


# The list.


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.name)
def test_a_piece_is_a_study_whose_options_are_accepted(piece, tmp_path):
    import importlib

    from persia_sim.base.command_line import read_options

    options = importlib.import_module(module_of(piece.name)).Options
    assert piece.name in STUDIES and piece.section in SECTIONS and piece.csv
    for name in ("rows_a.csv", "workloads.csv", "systems.csv"):
        (tmp_path / name).write_text("a\n")
    for size in ("quick", "full"):
        own = piece.arguments(size, tmp_path)
        if own is not None:
            words = [*own, "--out", str(tmp_path / "out")]
            read_options(options, words, piece.name)


def test_pieces_and_their_tables_have_names_of_their_own():
    assert len({piece.name for piece in PIECES}) == len(PIECES)
    tables = [name for piece in PIECES for name in piece.csv]
    assert len(set(tables)) == len(tables)


def test_the_quick_report_is_planned_for_under_20_minutes():
    assert sum(piece.share_of_time("quick") for piece in PIECES) < 20


def test_pieces_are_chosen_in_the_order_of_the_report():
    first, last = PIECES[0].name, PIECES[-1].name
    assert [piece.name for piece in chosen([last, first])] == [first, last]
    assert chosen([]) == list(PIECES)
    with pytest.raises(ValueError, match=r"only must name pieces \(.*demo.*\), got 'dmeo'"):
        chosen(["dmeo"])


def test_a_folder_of_measurements_must_hold_them(tmp_path):
    (tmp_path / "workloads.csv").write_text("a\n")
    with pytest.raises(ValueError, match=r"lacks rows\*\.csv, systems\.csv; name a folder"):
        measured(tmp_path)


# Running.


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """One piece that ends well, and one whose options are refused."""
    out = tmp_path_factory.mktemp("paper")
    plan = {GOOD: QUICK, BAD: ("--steps", "7")}
    failed = run_pieces(plan, "quick", out)
    (out / GOOD.name / GOOD.png).write_bytes(PNG)
    return out, plan, failed


@pytest.mark.long
@pytest.mark.multiproc
def test_a_failed_piece_stops_no_other_and_says_why(ran):
    _, _, failed = ran
    assert list(failed) == [BAD]
    assert "steps must be >= 8, got 7" in failed[BAD] and failed[BAD].endswith("(exit code 2)")


@pytest.mark.multiproc
def test_a_second_run_does_only_what_is_missing(ran):
    out, plan, _ = ran
    assert list(missing(plan, out)) == [BAD]
    other = {GOOD: (*QUICK, "--steps", "9")}
    assert list(missing(other, out)) == [GOOD], "other arguments are another run"


@pytest.mark.multiproc
def test_a_table_that_was_changed_is_made_anew(ran, tmp_path):
    out, plan, _ = ran
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    assert GOOD not in missing(plan, tmp_path)
    table = tmp_path / GOOD.name / GOOD.csv[0]
    table.write_text(table.read_text().replace("hybrid", "hybrit"))
    assert GOOD in missing(plan, tmp_path)
    table.unlink()
    assert GOOD in missing(plan, tmp_path)


@pytest.mark.multiproc
def test_a_finished_piece_says_what_made_it(ran):
    out, _, _ = ran
    found = record.valid_record(GOOD, out)
    table = out / GOOD.name / GOOD.csv[0]
    assert found.sha256 == {table.name: hashlib.sha256(table.read_bytes()).hexdigest()}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found.date)
    assert record.command(GOOD.name, found.arguments) == (
        "persia-experiments simulator-speed --most-ranks 8 --steps 8 --closed-forms 1"
    )
    assert str(out) not in (out / GOOD.name / record.FILE).read_text()


@pytest.mark.multiproc
def test_ctrl_c_ends_the_pieces_and_leaves_a_state_to_go_on_from(tmp_path):
    words = [sys.executable, "-m", "experiments", "paper", "--only", "simulator-speed"]
    process = subprocess.Popen(
        [*words, "--out", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    line = process.stdout.readline()
    assert line.startswith("simulator-speed: started"), line + process.stdout.read()
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=200)
    assert process.returncode == 130 and "interrupted" in told
    assert not (tmp_path / "report.html").exists()
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in running


def test_the_command_ends_with_a_table_of_all_claims(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("experiments.studies.paper.run_pieces", lambda *_: {})
    assert main(["paper", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out.splitlines()
    ends = [line.rsplit("  ", 1)[-1] for line in told[2:-2]]
    known = (
        r"supported|contradicted|needs \d+ more seeds|no independent evidence possible|.* table .*"
    )
    assert len(ends) == len(claims(tmp_path)) and all(re.fullmatch(known, end) for end in ends)
    assert told[-1] == f"report: {tmp_path / 'report.html'}"


# The page.


class Reader(HTMLParser):
    """What a structural check needs: balance, ids, pictures, figures, tables."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.links: list[str] = []
        self.resources: list[str] = []
        self.words: dict[str, list[str]] = {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        known = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if "id" in known:
            self.ids.append(known["id"])
        if tag == "img":
            self.images.append(known)
        if tag == "a":
            self.links.append(known["href"])
        self.resources += [known[k] for k in ("src", "data", "srcset") if k in known]
        if tag in ("script", "iframe", "object"):
            raise AssertionError(f"the page has a {tag}")
        if tag == "link":
            self.resources.append(known["href"])

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        for tag in set(self.open):
            self.words.setdefault(tag, []).append(data)


@pytest.fixture(scope="module")
def report(ran):
    out, plan, failed = ran
    return Report(
        size="quick",
        out=out,
        plan={**plan, NEVER: ()},
        left_out={replace(BAD, name="fit", title="Left"): "no reason"},
        failed=failed,
        claims=claims(out),
    )


@pytest.fixture(scope="module")
def html(report, tmp_path_factory):
    return page(report, tmp_path_factory.mktemp("page"))


def page(report, folder):
    return write_report(report, folder / "page.html").read_text()


@pytest.mark.multiproc
def test_the_page_needs_nothing_beside_itself(html):
    read = Reader(html)
    assert read.resources and all(r.startswith("data:") for r in read.resources)
    assert not re.search(r"url\((?!data:)|@import", html)
    assert all(link.startswith("#") and link[1:] in read.ids for link in read.links)


@pytest.mark.multiproc
def test_pictures_have_their_bytes_and_words(html):
    (image,) = Reader(html).images
    assert base64.b64decode(image["src"].removeprefix("data:image/png;base64,")) == PNG
    assert image["alt"] == "Speed & <size>. What is read."


@pytest.mark.multiproc
def test_ids_are_unique_and_claims_come_first(html):
    ids = Reader(html).ids
    assert len(set(ids)) == len(ids)
    assert ids[0] == "claims"


@pytest.mark.multiproc
def test_a_figure_says_command_machine_date_commit_checksum_and_data(html, ran):
    told = "".join(Reader(html).words["figcaption"])
    found = record.valid_record(GOOD, ran[0])
    for word in (
        "What is read.", record.command(GOOD.name, QUICK), found.machine, found.date,
        found.commit, *found.sha256.values(), "no data set",
    ):  # fmt: skip
        assert word in told, word


@pytest.mark.multiproc
def test_what_is_missing_stands_at_the_top_and_in_its_place(html):
    top = "".join(Reader(html).words["aside"])
    assert "Bad (scale-workers) failed" in top
    assert "Never (demo) has not been run" in top
    assert "Left (fit) is left out: no reason" in top
    assert "steps must be &gt;= 8, got 7" in html.split("<pre>")[1]
    assert html.index("<aside") < html.index('id="claims"')


@pytest.mark.multiproc
def test_every_claim_stands_on_the_page_with_both_verdicts(html, report):
    for claim in report.claims:
        assert claim.says in html
    counts = [
        html.count(f'class="verdict {v}"') for v in ("supported", "contradicted", "undecided")
    ]
    assert sum(counts) == 2 * len(report.claims)


EVIL = "<script>alert(1)</script>"


@pytest.mark.parametrize("field", ["commit", "date", "machine", "arguments", "sha256"])
def test_nothing_of_a_pieces_record_is_more_than_text_on_the_page(field, tmp_path):
    table = tmp_path / GOOD.name / GOOD.csv[0]
    table.parent.mkdir()
    table.write_text(f"a,{EVIL}\n{EVIL},1\n")
    sums = record.checksums(GOOD, table.parent)
    content = {"arguments": ["--out", "x"], "commit": "c", "machine": "m", "date": "2026-01-01",
               "seconds": 1.0, "sha256": sums}  # fmt: skip
    content[field] = (
        [EVIL] if field == "arguments" else sums | {EVIL: EVIL} if field == "sha256" else EVIL
    )
    (table.parent / record.FILE).write_text(json.dumps(content))
    made = Report(size="quick", out=tmp_path, plan={GOOD: ()}, left_out={}, failed={}, claims=[])
    text = page(made, tmp_path)
    assert "<script" not in text
    if field != "sha256":  # other sums than those of its tables: not its record
        assert "&lt;script" in text


@pytest.mark.parametrize(
    "change", [{"commit": 5}, {"sha256": []}, {"seconds": "x"}, {"date": None}]
)
def test_a_record_of_another_shape_is_no_record(change, tmp_path):
    table = tmp_path / GOOD.name / GOOD.csv[0]
    table.parent.mkdir()
    table.write_text("a\n1\n")
    content = {"arguments": [], "commit": "c", "machine": "m", "date": "2026-01-01", "seconds": 1.0,
               "sha256": record.checksums(GOOD, table.parent)}  # fmt: skip
    file = table.parent / record.FILE
    file.write_text(json.dumps(content))
    assert record.valid_record(GOOD, tmp_path) is not None
    file.write_text(json.dumps(content | change))
    assert record.valid_record(GOOD, tmp_path) is None


@pytest.mark.multiproc
def test_three_lines_at_the_top_count_every_verdict_also_those_of_none(html, report):
    lines = summary(report.claims)
    assert len(lines) == 3 and all(line in unescape(html) for line in lines)
    assert html.index(lines[2].split(":")[0]) < html.index('id="claims"')
    for line, words in zip(lines, (OF_PLOTS, WORDS), strict=False):
        numbers = [int(re.search(rf"(\d+) {said}", line)[1]) for said in words.values()]
        assert sum(numbers) == len(report.claims)


def test_a_data_set_is_named_with_its_own_terms():
    told = dict(described(["tennis-random", "synthetic:avazu-ad:1:3", "my.toml", "avazu"]))
    assert (
        "CC BY-NC-SA" in told["tennis-random"] and "this project" in told["synthetic:avazu-ad:1:3"]
    )
    assert "user" in told["my.toml"] and "publisher" in told["avazu"]


# Keeping results.


@pytest.mark.multiproc
def test_stored_tables_come_with_what_made_them(ran, tmp_path):
    out, _, _ = ran
    tables, pictures = tmp_path / "results", tmp_path / "pictures"
    tables.mkdir()
    pictures.mkdir()
    (tables / "index.csv").write_text(",".join(COLUMNS) + "\nother.csv,a,b,c,d,e\n")
    assert store([GOOD, NEVER], out, tables, pictures) == [GOOD.csv[0]]
    with (tables / "index.csv").open() as file:
        other, own = csv.DictReader(file)
    assert other["file"] == "other.csv" and other["sha256"] == "e"
    stored = (tables / GOOD.csv[0]).read_bytes()
    assert stored == (out / GOOD.name / GOOD.csv[0]).read_bytes()
    assert own["sha256"] == hashlib.sha256(stored).hexdigest()
    assert own["command"].startswith("persia-experiments simulator-speed --most-ranks 8")
    assert (pictures / GOOD.png).read_bytes() == PNG
    with pytest.raises(ValueError, match="no finished piece"):
        store([NEVER], out, tables, pictures)


# In a browser.


@pytest.mark.multiproc
def test_nothing_overflows_on_a_phone_or_on_a_desk(report, tmp_path):
    path = write_report(report, tmp_path / "report.html")
    widths = browser.measured(path, (400, 1400), tmp_path)
    assert set(widths) == {400, 1400}
    for width, told in widths.items():
        assert told["content"] <= width and told["outside"] == [] and told["blank"] == 0


def test_a_line_over_several_streams_is_no_data_of_the_users():
    from experiments.paper.page import described

    assert [name for name, _ in described(["synthetic:zipf-1.4", "2 streams"])] == [
        "synthetic:zipf-1.4"
    ]
