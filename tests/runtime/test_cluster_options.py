"""What is typed for a run on a cluster: numbers that may be ranges, and where it is."""

from __future__ import annotations

import sys

import pytest

from runtime.train_options import cluster_asked, read_train


@pytest.mark.parametrize(
    ("name", "group"), [("ranks", "sync"), ("servers", "engine")], ids=["ranks", "servers"]
)
def test_numbers_on_a_cluster_stand_where_they_are_typed_or_in_the_file(name, group, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f"engine.executor = 'concurrent'\n{group}.{name} = 8\n")
    words = ["--ray", "auto", "--config", str(file)]

    def numbers(*typed: str) -> tuple[int, int]:
        asked = cluster_asked([*words, *typed])
        assert (asked.where, asked.words) == ("auto", words)
        return tuple(getattr(asked, name))

    assert numbers() == (8, 8)
    for typed in ([f"--{name}", "3"], [f"--{name}=3"], [f"--{group}.{name}", "3"]):
        assert numbers(*typed) == (3, 3)
    assert numbers(f"--{name}", "2:8") == (2, 8)
    assert cluster_asked([f"--{name}", "3"]) is None


@pytest.mark.parametrize("name", ["ranks", "servers"])
@pytest.mark.parametrize("typed", ["0:3", "4:3", ":3", "x:3", "-1:3", "1:2:3"])
def test_a_range_is_least_and_most(name, typed):
    with pytest.raises(ValueError, match=f"--{name}.*{typed}"):
        cluster_asked(["--ray", "auto", f"--{name}={typed}"])


@pytest.mark.parametrize("name", ["ranks", "servers"])
def test_a_range_is_of_a_cluster(name, refused):
    assert f"--{name}" in refused("train", f"--{name}", "2:8")


@pytest.mark.parametrize("where", ["local", "local:0", "local:65", "local:x", "here", "a:b"])
def test_what_names_no_cluster_is_refused(where):
    with pytest.raises(ValueError, match=f"--ray must be local:N .* got '{where}'"):
        read_train(["--ray", where])


@pytest.mark.parametrize("words", [["--ray", "local:1"], []])
def test_memory_of_servers_is_asked_of_a_cluster_and_not_below_zero(words):
    with pytest.raises(ValueError, match="--cluster-server-bytes is >= 0, and read with --ray"):
        read_train([*words, "--cluster-server-bytes", "-1" if words else "1"])


def test_servers_that_are_there_are_not_for_a_cluster():
    at = ["--servers", "1", "--servers-at", "a:1", "--servers-secret", "s"]
    with pytest.raises(ValueError, match="--ray places the servers itself; remove --servers-a"):
        cluster_asked(["--ray", "auto", *at])


def test_without_ray_a_sentence_says_what_to_install(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for module in [name for name in sys.modules if name.startswith("runtime.cluster")]:
        monkeypatch.delitem(sys.modules, module)
    assert "pip install 'persia-testbed[cluster]'" in refused("train", "--ray", "local:2")
