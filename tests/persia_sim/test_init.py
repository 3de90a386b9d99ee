"""The files that `persia-sim init` writes, and what a cluster's file may leave out."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields, replace

import pytest

from persia_sim.base.command_line import texts_of
from persia_sim.cli.example import write_examples
from persia_sim.cluster.cluster import Cluster, Link, Role
from persia_sim.cluster.costs import Costs
from persia_sim.cluster.machine import Gpu, Host
from persia_sim.cluster.tables import Table
from persia_sim.presets.catalogue import CLUSTERS, MACHINES
from persia_sim.presets.costs import CATALOGUE
from persia_sim.presets.from_file import (
    read_cluster,
    read_host,
    read_workload,
    record_of,
)
from persia_sim.sharded.presets import rankers, read_model
from persia_sim.sharded.ranker import Ranker
from tests.persia_sim.test_files_and_names import answer, written

ROLES = ("nn", "embedding_workers", "servers")


def test_the_example_files_read_back_as_what_they_were_written_from(tmp_path):
    paths = {path.name: path for path in write_examples(tmp_path)}
    cluster, costs = read_cluster(paths["cluster.toml"])
    preset = CLUSTERS["h100-host"]()
    for role, of_preset in ((getattr(cluster, name), getattr(preset, name)) for name in ROLES):
        assert (role.host, role.hosts) == (of_preset.host, of_preset.hosts)
    assert costs == CATALOGUE
    assert record_of(Costs, tomllib.loads(paths["costs.toml"].read_text())["costs"], "") == costs
    workload = read_workload(paths["workload.toml"])
    assert (workload.name, workload.dim, workload.batch_per_rank) == ("my-workload", 128, 1024)
    model = rankers()["dlrm"]
    assert read_model(paths["model.toml"]) == replace(
        model, name="my-model", tables=model.tables[:3]
    )
    assert read_host(paths["system.toml"]) == replace(MACHINES["dgx-h100"], name="my-machine")


def test_every_field_stands_in_the_example_under_its_meaning(tmp_path):
    text = {path.name: path.read_text() for path in write_examples(tmp_path)}
    places = {Cluster: "cluster", Role: "cluster", Link: "cluster", Host: "system", Costs: "costs",
              Ranker: "model", Table: "model", Gpu: "system"}  # fmt: skip
    for kind, place in places.items():
        name = f"{place}.toml"
        says = texts_of(kind)
        for field in fields(kind):
            assert says[field.name][:30] in text[name], (kind, field.name)
            assert field.name in text[name]


def test_the_example_of_a_cluster_asks_for_machines_and_their_numbers_alone(tmp_path):
    """What stands behind a `#` is what is so without it."""
    (path,) = (path for path in write_examples(tmp_path) if path.name == "cluster.toml")
    lines = path.read_text().splitlines()
    asked = [line.split(" = ")[0] for line in lines if line and not line.startswith("#")]
    assert asked == [word for role in ROLES for word in (f"[{role}]", "host", "hosts")]
    whole = "\n".join(re.sub(r"^#(?! )", "", line) for line in lines)
    assert tomllib.loads(whole).keys() == {one.name for one in fields(Cluster)}
    assert read_cluster(written(tmp_path, whole)) == read_cluster(path)


MACHINES_ALONE = """
[nn]
host = "p5.48xlarge"
hosts = 2
[embedding_workers]
host = "c2-standard-30"
hosts = 3
[servers]
host = "m2-ultramem-416"
hosts = 1
"""


def test_what_a_cluster_leaves_out_follows_from_its_machines(tmp_path):
    cluster, _ = read_cluster(written(tmp_path, MACHINES_ALONE))
    assert (cluster.ranks, cluster.loaders, cluster.link.latency_s) == (16, 128, 50e-6)
    roles = [getattr(cluster, name) for name in ROLES]
    assert [one.processes_per_host for one in roles] == [8, 1, 1]
    assert [one.cores_per_process for one in roles] == [192 // 8, 30, 416]
    assert roles[0].ram_bytes_per_process == MACHINES["p5.48xlarge"].ram_bytes / 8
    half = MACHINES_ALONE.replace("hosts = 2", "hosts = 2\nprocesses_per_host = 4")
    cluster, _ = read_cluster(written(tmp_path, half))
    assert (cluster.ranks, cluster.loaders, cluster.nn.cores_per_process) == (8, 64, 48)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("hosts = 3", ""), "embedding_workers.hosts is missing"),
        (('host = "m2-ultramem-416"', ""), "servers.host is missing"),
        (("hosts = 1", "hosts = 1\nprocesses_per_host = 0"), "processes_per_host (of type"),
        (("[nn]", "ranks = 3\n[nn]"), "ranks is 3: 2 hosts of 8 GPUs must hold them"),
    ],
)
def test_what_does_not_follow_is_asked_for(changed, said, tmp_path):
    with pytest.raises(ValueError, match=re.escape(said)):
        read_cluster(written(tmp_path, MACHINES_ALONE.replace(*changed)))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--foo"], "init has no option --foo: it takes one folder, or none"),
        (["-h2"], "init has no option -h2"),
        ([""], "init is given an empty name: name a folder, or leave it out"),
        (["a", "b"], "init is given ['a', 'b']: it takes one folder, or none"),
    ],
)
def test_init_makes_no_folder_of_what_is_no_name_of_one(
    words, sentence, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    code, _, said = answer(monkeypatch, capsys, "init", *words)
    assert code == 2 and sentence in said
    assert not list(tmp_path.iterdir())


def test_init_on_a_full_disk_leaves_nothing(small_disk, monkeypatch, capsys):
    """A cut file would be refused by the next one, as a file that is there."""
    disk = small_disk(16)
    code, _, said = answer(monkeypatch, capsys, "init", str(disk / "new" / "folder"))
    assert code == 2 and "No space left on device; free some space" in said
    assert not list(disk.iterdir())
    (disk / "mine").mkdir()
    code, _, said = answer(monkeypatch, capsys, "init", str(disk / "mine"))
    assert code == 2 and [file.name for file in disk.rglob("*")] == ["mine"]


def test_init_touches_nothing_that_is_there(tmp_path, monkeypatch, capsys):
    (tmp_path / "workload.toml").write_text("mine")
    code, _, said = answer(monkeypatch, capsys, "init", str(tmp_path))
    assert code == 2 and "workload.toml is there already; move it" in said
    assert [path.name for path in tmp_path.iterdir()] == ["workload.toml"]
    code, said, _ = answer(monkeypatch, capsys, "init", str(tmp_path / "new"))
    assert code == 0 and (tmp_path / "new" / "cluster.toml").exists() and "edit" in said
    code, said, _ = answer(monkeypatch, capsys, "init", "--help")
    assert code == 0 and "init [FOLDER]" in said and "--cluster" not in said
