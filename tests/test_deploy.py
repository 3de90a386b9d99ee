"""What lies in deploy/ is what its users' tools read; nothing of it ever ran."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml  # comes with torch's and jupyter's dependencies

from runtime.train_options import cluster_asked

DEPLOY = Path(__file__).parent.parent / "deploy"


def documents() -> list[dict]:
    return list(yaml.safe_load_all((DEPLOY / "rayjob.yaml").read_text()))


def strict(schema) -> None:
    """Have a schema of Kubernetes refuse fields that it does not know."""
    if isinstance(schema, list):
        for part in schema:
            strict(part)
    if not isinstance(schema, dict):
        return
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") == "object" and "properties" in schema and not open_ended:
        schema.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("anyOf", None)
        schema["type"] = ["integer", "string"]
    for part in list(schema.values()):
        strict(part)


def test_the_rayjob_is_what_kuberay_reads():
    jsonschema = pytest.importorskip("jsonschema")
    file = os.environ.get("KUBERAY_CRD", "")
    if not Path(file).is_file():
        pytest.skip("KUBERAY_CRD names no ray.io_rayjobs.yaml of KubeRay")
    crd = yaml.load(Path(file).read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    schema = next(v for v in crd["spec"]["versions"] if v["name"] == "v1")["schema"]
    schema = schema["openAPIV3Schema"]
    strict(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    job = documents()[1]
    found = jsonschema.Draft7Validator(schema)
    assert [error.message for error in found.iter_errors(job)] == []
    job["spec"]["rayClusterSpec"]["planted"] = 1
    assert ["planted" in error.message for error in found.iter_errors(job)] == [True]


def test_the_job_trains_what_its_config_says(tmp_path):
    config, job = documents()
    words = job["spec"]["entrypoint"].split()
    assert words[:4] == ["python", "-m", "runtime", "train"]
    file = tmp_path / "run.toml"
    file.write_text(config["data"]["run.toml"])
    assert words[5] == "/config/run.toml"
    asked = cluster_asked(["--config", str(file), *words[6:]])
    assert asked is not None and (asked.where, asked.ranks) == ("auto", 2)


def test_the_clusters_launcher_reads_what_it_starts():
    jsonschema = pytest.importorskip("jsonschema")
    autoscaler = pytest.importorskip("ray.autoscaler", reason="Ray is not installed")
    from runtime.cluster.room import OFFERED

    schema = json.loads((Path(autoscaler.__file__).parent / "ray-schema.json").read_text())
    cluster = yaml.safe_load((DEPLOY / "ray-up.yaml").read_text())
    found = jsonschema.Draft7Validator(schema)
    assert [error.message for error in found.iter_errors(cluster)] == []
    kinds = cluster["available_node_types"]
    assert sum(kind.get("min_workers", 0) for kind in kinds.values()) == cluster["max_workers"]
    assert all(offer in kinds[role]["resources"] for role, offer in OFFERED.items())
    kinds["servers"]["planted"] = 1
    assert ["planted" in error.message for error in found.iter_errors(cluster)] == [True]


def test_the_slurm_script_is_one_of_bash():
    subprocess.run(["bash", "-n", str(DEPLOY / "slurm.sbatch")], check=True)


@pytest.mark.parametrize("name", ["Dockerfile", "rayjob.yaml", "ray-up.yaml", "slurm.sbatch"])
def test_what_never_ran_says_so(name):
    assert "Never run" in (DEPLOY / name).read_text()
