"""Which mode on a cluster, without a log: every window simulated, beside the cluster's sync."""

from __future__ import annotations

import signal

import pytest

from experiments.__main__ import main
from experiments.choosing.table import GAINS
from experiments.studies import which_mode
from persia_sim.base.vocabulary import Mode
from persia_sim.presets.catalogue import CLUSTERS
from persia_sim.report import sweep
from tests.experiments.raw_runs import printed_by, read_csv

STEP_S = {Mode.SYNC: 4.0, Mode.LOOKAHEAD: 2.0, Mode.HYBRID: 1.0, Mode.ASYNC: 2.0}


def evaluate(point: sweep.Point, half_width: float, most_steps: int) -> dict:
    """Made rates: a rank has 100 samples a step, and reads miss the window's last update."""
    ranks = CLUSTERS[point.cluster]().ranks
    late = point.tau or 0
    pushes = (late + 1) * ranks - 1
    return sweep.named(point) | {
        "samples_per_s": 100 * ranks / STEP_S[point.mode], "relative_half_width_95": 0.01,
        "binds": "", "dense_late": not point.mode.has_barrier, "usd_per_million_samples": 1.0,
        "staleness_steps_mean": late, "staleness_pushes_mean": pushes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    out = tmp_path_factory.mktemp("which-mode")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "evaluate", evaluate)
        text = printed_by(which_mode.run, which_mode.Options(out=out, jobs=1))
    return out, text, read_csv(out / "which_mode.csv")


@pytest.mark.long
def test_every_window_of_every_mode_is_simulated_on_both_clusters(told):
    modes = ["sync", "lookahead"]
    modes += [f"hybrid, tau {tau}" for tau in (1, 2, 4, 8, 16)]
    modes += [f"async, tau {tau}" for tau in (0, 1, 2, 4)]
    for cluster in ("v100-paper", "h100-host"):
        own = [line for line in told[2] if line["cluster"] == cluster]
        assert [line["mode"] for line in own] == modes
        assert {line["workload"] for line in own} == {"kwai-video"}
        assert f"{cluster}; kwai-video" in told[1]
    assert (told[0] / "which_mode.png").is_file()


@pytest.mark.long
def test_hosts_are_those_of_the_cluster_and_rates_are_beside_its_own_sync(told):
    for line in told[2]:
        cluster = CLUSTERS[line["cluster"]]()
        assert int(line["servers"]) == cluster.servers.hosts
        assert int(line["workers"]) == cluster.embedding_workers.hosts
        mode = Mode(line["mode"].partition(",")[0])
        assert float(line["times_sync"]) == pytest.approx(4.0 / STEP_S[mode])
        assert float(line["samples_per_s_low"]) < float(line["samples_per_s_high"])


@pytest.mark.long
def test_lateness_is_that_of_the_simulation(told):
    """A common step is one update; in async each of 8 ranks pushes one."""
    late = {
        line["mode"]: (line["rows_late"], line["dense_late"])
        for line in told[2]
        if line["cluster"] == "h100-host"
    }
    assert late["sync"] == late["lookahead"] == ("0", "0")
    assert (late["hybrid, tau 16"], late["async, tau 4"]) == (("16", "0"), ("39", "7"))


@pytest.mark.long
def test_dollars_are_those_of_all_hosts_at_list_price(told):
    line = next(x for x in told[2] if x["cluster"] == "h100-host")
    cluster = CLUSTERS["h100-host"]()
    assert float(line["usd_per_hour"]) == pytest.approx(cluster.usd_per_hour)
    a_billion = cluster.usd_per_hour / 3600 / float(line["samples_per_s"]) * 1e9
    assert float(line["usd_per_billion_samples"]) == pytest.approx(a_billion)
    # 8 hosts of 8 V100 at 24.48, 100 of 52 cores at 1,007 / 730 a month for 30 cores.
    paper = next(x for x in told[2] if x["cluster"] == "v100-paper")
    assert float(paper["usd_per_hour"]) == pytest.approx(8 * 24.48 + 100 * 1007 / 730 * 52 / 30)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"minutes": 5.0}, "minutes is about a log; add --data"),
        ({"data": "clicks.toml", "cluster": ("a.toml", "b.toml")}, "must be one with --data"),
        ({"data": "a.toml", "cluster": ("no.toml",)}, "cluster no.toml does not exist; write an"),
        ({"data": "a.toml", "workload": "no.toml"}, "workload no.toml does not exist; write an"),
        ({"cluster": ("gcp",)}, "--cluster is 'gcp': "),
        ({"data": "a.toml", "set": ("sync.mode=hybrid",)}, "set has sync.mode=hybrid: which-mode"),
        ({"data": "a.toml", "set": ("data.name=b.toml",)}, "b.toml: --data names the log; remove"),
        ({"data": "a.toml", "set": ("batch=64,128",)}, "set gives batch 2 values"),
    ],
)
def test_what_cannot_be_asked_says_what_would_do(given, said):
    with pytest.raises(ValueError, match=said):
        which_mode.Options(**given)


@pytest.fixture
def made(monkeypatch):
    """What is printed and stored of made rates, without a picture."""
    monkeypatch.setattr(sweep, "evaluate", evaluate)
    monkeypatch.setattr(which_mode, "drawn", lambda *paths: paths[0])

    def asked(out, cluster, workload, **more):
        options = which_mode.Options(cluster=(cluster,), workload=workload, out=out, jobs=1, **more)
        return printed_by(which_mode.run, options), read_csv(out / "which_mode.csv")

    return asked


def test_other_hosts_than_the_clusters_are_told_and_how_to_keep_these(made, tmp_path):
    keeps = "--hosts given keeps the 4 + 3 of h100-host"
    text, lines = made(tmp_path / "free", "h100-host", "kwai-video", hosts="free")
    assert keeps in text
    assert {line["workers"] for line in lines} != {"4"}
    assert all(f" {line['workers']} + {line['servers']} " in text for line in lines)
    text, lines = made(tmp_path / "given", "h100-host", "kwai-video", hosts="given")
    assert keeps not in text and {line["workers"] for line in lines} == {"4"}


def test_of_a_cluster_without_prices_the_rate_alone_is_told(made, tmp_path):
    for hosts in ("free", "given"):
        text, lines = made(tmp_path / hosts, "this-host", "taobao-ad", hosts=hosts)
        assert {line["usd_per_billion_samples_low"] for line in lines} == {"nan"}
        assert all(float(line["samples_per_s_low"]) > 0 for line in lines) and " ? " in text


def test_rates_and_prices_of_a_small_cluster_have_figures():
    row = {"samples_per_s_low": 41.4, "samples_per_s_high": 962.0,
           "usd_per_billion_samples_low": 0.0313, "usd_per_billion_samples_high": 4.26}  # fmt: skip
    assert GAINS["k samples/s"](row) == "0.041 to 0.96"
    assert GAINS["$ for 10^9"](row) == "0.031 to 4.3"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_a_study_in_a_sentence_and_the_same_command_goes_on(
    number, status, tmp_path, monkeypatch, capsys
):
    before = signal.signal(number, lambda *_: pytest.fail("nobody hears it"))
    monkeypatch.setattr(which_mode, "run", lambda options: signal.raise_signal(number))
    try:
        assert main(["which-mode", "--out", str(tmp_path)]) == status
    finally:
        signal.signal(number, before)
    told = capsys.readouterr().err.strip()
    assert told == f"interrupted; what is done is in {tmp_path}, and the same command does the rest"
