"""The whole screen and its JSON: every fact against the figure that it is of."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import pytest

from persia_sim.__main__ import main
from persia_sim.base.command_line import read_options
from persia_sim.base.facts import on_screen
from persia_sim.base.vocabulary import Mode
from persia_sim.cli import SimulateOptions, run
from persia_sim.cluster.scenario import Discipline
from persia_sim.engine.simulate import simulate
from persia_sim.report.figures import as_json, figures
from persia_sim.report.measure import Estimate
from persia_sim.report.report import report
from persia_sim.report.screen import SPEED, facts
from tests.persia_sim.hand_world import facts_of, hand_scenario, sync_of_two


def test_a_fact_stands_on_a_line_with_its_name_in_one_column():
    said = on_screen({"Fast?": [("rate", "2 a second"), ("none", "")], "Empty?": [], "Why?": [
        ("step time", "3 s\n4 s")]})  # fmt: skip
    assert said == "Fast?\n  rate       2 a second\n\nWhy?\n  step time  3 s\n             4 s"


@pytest.mark.parametrize(
    ("half_width", "said"),
    [
        (0.04, "+-4.00 % of it, from 100 steps without the warm-up\n2 % takes about --steps 340"),
        (0.02, "+-2.00 % of it, from 100 steps without the warm-up"),
        (
            1.5,
            "wider than the rate itself: 100 steps are too few\ntoo wide to tell how many steps"
            " 2 % takes: without --steps a run goes on by itself",
        ),
        (inf, "unknown: 100 steps without the warm-up are too few"),
    ],
)
def test_the_interval_says_whether_the_steps_are_enough(half_width, said):
    found = replace(report(simulate(sync_of_two())), samples_per_s=Estimate(1.0, half_width, 100))
    assert dict(facts(found, narrow=0.02)[SPEED])["its 95 % interval"] == said


@pytest.mark.parametrize(
    ("half_width", "rate", "step", "dollars"),
    [
        (0.02, "0.0708 samples/s", "113000.00 ms", "$86319.444"),
        (0.3, "about 0.071 samples/s", "about 110000 ms", "about $86000.000"),
        (0.97, "about 0.07 samples/s", "about 100000 ms", "about $90000.000"),
    ],
)
def test_a_rate_that_is_hardly_known_has_few_digits(half_width, rate, step, dollars):
    """A rate known to a factor of two was printed with three digits, its step with five."""
    known = report(simulate(sync_of_two()))
    mean = known.samples_per_s.mean
    result = replace(known, samples_per_s=Estimate(mean, half_width * mean, 34))
    shown = facts_of(result)
    assert (shown["throughput"], shown["step"].splitlines()[0]) == (rate, step)
    assert shown["cost of 10^6 samples"] == dollars
    assert ("goes on by itself" in shown["its 95 % interval"]) == (half_width > 0.1)


def test_the_json_holds_the_figures_unrounded():
    found = report(simulate(hand_scenario(Mode.HYBRID, tau=1, steps=6), trace=True))
    told = json.loads(as_json(figures(found, {"twice": {"GPU": Estimate(0.25, inf, 5)}})))
    assert told["throughput"]["samples_per_s"] == found.samples_per_s.mean
    assert told["throughput"]["half_width"] is None, "six steps have no interval"
    assert told["step"] == {
        "seconds": found.step_s.mean, "bound_s": found.bound.step_s, "bound_by": found.bound.binds
    }  # fmt: skip
    assert told["critical_path"]["by_stage"] == pytest.approx(found.stages)
    assert told["staleness"]["steps_mean"] == 1 and told["staleness"]["rows"]["fresh"] == 0
    assert told["gains"]["twice"]["GPU"] == {"mean": 0.25, "half_width": None, "values": 5}
    assert told["cost"]["usd_per_hour"] == found.usd_per_hour
    assert told["memory"] is None, "nobody asked whether the rows fit"
    assert told["simulated"]["gpus"] == [{"name": "abacus", "count": 1}]


WORDS = ("--cluster", "v100-2021-09", "--workload", "taobao-ad", "--ranks", "2", "--steps", "20")


def test_the_command_prints_a_screen_or_json():
    screen, document = (
        run(read_options(SimulateOptions, [*WORDS, *form], "persia-sim"))
        for form in ([], ["--json"])
    )
    assert screen.startswith("What is simulated?\n  cluster ")
    told = json.loads(document)
    assert told["simulated"]["cluster"] == "v100-2021-09" and told["memory"]["fits"] is True
    rate = told["throughput"]["samples_per_s"]
    assert f"{rate / 1e3:.3g} ksamples/s" in screen


def test_a_name_from_a_file_leaves_the_document_one(tmp_path, monkeypatch, capsys):
    """Its control characters are escapes of JSON, which a reader of JSON takes back."""
    (tmp_path / "w.toml").write_text('base = "taobao-ad"\nname = "a\\u0085\\u001b[2J\\u202e"\n')
    words = ["--cluster", "v100-2021-09", "--ranks", "2", "--steps", "3", "--json"]
    words += ["--row-format", "f32-sgd", "--workload", str(tmp_path / "w.toml")]
    monkeypatch.setattr("sys.argv", ["persia-sim", *words])
    assert main() == 0
    said = capsys.readouterr().out
    assert said.isascii() and "\x1b" not in said
    assert json.loads(said)["simulated"]["workload"] == "a\x85\x1b[2J\u202e"


@pytest.mark.long
def test_a_rate_far_below_what_the_nics_allow_says_so_beside_that_of_another_discipline():
    options = {"cluster": "h100-host", "workload": "kwai-video", "mode": "hybrid", "tau": 16}
    each = SimulateOptions(
        **options, servers=8, workers=8, steps=150, discipline=Discipline.FLUID_EACH
    )
    line = next(line for line in run(each).splitlines() if "shared otherwise" in line)
    assert "% below what the NICs allow; as fluid it is 1.0" in line
    assert "shared otherwise" not in run(replace(each, discipline=Discipline.FLUID))
