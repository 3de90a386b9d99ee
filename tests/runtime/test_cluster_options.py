"""What is typed for a run on a cluster: numbers that may be ranges, and where it is."""

from __future__ import annotations

import sys

import pytest

from runtime.train_options import cluster_asked


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


def test_servers_that_are_there_are_not_for_a_cluster():
    at = ["--servers", "1", "--servers-at", "a:1", "--servers-secret", "s"]
    with pytest.raises(ValueError, match="--ray places the servers itself; remove --servers-a"):
        cluster_asked(["--ray", "auto", *at])


def test_without_ray_a_sentence_says_what_to_install(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for module in [name for name in sys.modules if name.startswith("runtime.hosts.ray")]:
        monkeypatch.delitem(sys.modules, module)
    assert "pip install 'persia-testbed[cluster]'" in refused("train", "--ray", "local:2")
