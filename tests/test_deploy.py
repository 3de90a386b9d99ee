"""What lies in deploy/ is what its users' tools read; what never ran there says so."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
import yaml  # comes with torch's and jupyter's dependencies

from runtime.train_command import run_command
from runtime.train_options import Range, cluster_asked

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
WORKFLOWS = ROOT / ".github" / "workflows"


JOB = DEPLOY / "rayjob.yaml"


def documents() -> dict[str, dict]:
    """Those of the RayJob by kind; of claims the last."""
    return {document["kind"]: document for document in yaml.safe_load_all(JOB.read_text())}


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
    job = documents()["RayJob"]
    found = jsonschema.Draft7Validator(schema)
    assert [error.message for error in found.iter_errors(job)] == []
    job["spec"]["rayClusterSpec"]["planted"] = 1
    assert ["planted" in error.message for error in found.iter_errors(job)] == [True]


def test_the_job_trains_what_its_config_says(tmp_path):
    config, job = documents()["ConfigMap"], documents()["RayJob"]
    words = job["spec"]["entrypoint"].split()
    assert words[:4] == ["python", "-m", "runtime", "train"]
    file = tmp_path / "run.toml"
    file.write_text(config["data"]["run.toml"])
    assert words[5] == "/config/run.toml"
    asked = cluster_asked(["--config", str(file), *words[6:]])
    assert asked is not None and asked.where == "auto"
    assert (asked.ranks, asked.servers) == (Range(2, 2), Range(2, 2))


def test_each_role_of_the_job_has_pods_that_nothing_else_fits_into():
    """As Ray places it: a core for each server, worker and loader, `--threads` for each rank."""
    offers = {"embedding_server": "servers", "embedding_worker": "workers", "loader": "loaders"}
    job = documents()["RayJob"]
    settings = tomllib.loads(documents()["ConfigMap"]["data"]["run.toml"])
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    room = {group["groupName"]: group for group in groups}
    for offer, role in offers.items():
        for group in groups:
            assert (offer in group["resources"]) == (group["groupName"] == role)
        if role in room:
            resources = room[role]["resources"]
            assert resources["CPU"] == resources[offer]
        asked = settings["engine"].get(role, 0)
        there = room[role]["replicas"] * int(room[role]["resources"][offer]) if asked else 0
        assert there == asked
    ranks = room["ranks"]["replicas"] * int(room["ranks"]["resources"]["CPU"])
    assert ranks >= settings["sync"]["ranks"]


def test_the_job_brings_its_claims_and_may_write_into_them():
    found = list(yaml.safe_load_all(JOB.read_text()))
    claims = {d["metadata"]["name"] for d in found if d["kind"] == "PersistentVolumeClaim"}
    pod = documents()["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    named = {
        v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "configMap" not in v
    }
    assert named == claims and pod["securityContext"]["fsGroup"]


# Commands as documented: srun forwards signals to its task and names the step's tasks; a job that
# is queued again keeps its number. `python` stands for the run, which writes a checkpoint at USR1.
FAKES = {
    "scontrol": 'echo "scontrol $*" >> "$LOG"; [ "$1" != show ] || printf "node%s\\n" 1 2 3 4',
    "srun": """
echo "srun $*" >> "$LOG"
while [[ $1 == --* ]]; do
  [[ $1 != --ntasks=* ]] || export SLURM_STEP_NUM_TASKS=${1#*=}
  shift
done
exec "$@"
""",
    "ray": """
[ "$1" = start ] || { [ -e "$RAY_UP" ]; exit; }
touch "$RAY_UP"
exec sleep 60
""",
    "python": """
echo "python $*" >> "$LOG"
[ -e "$CHECKPOINT" ] && exit "${AT_THE_END:-0}"
trap 'touch "$CHECKPOINT"; exit 75' USR1
touch "$LOG.training"
while true; do sleep 0.05; done
""",
}


def slurm_job(tmp_path: Path, **more: str) -> subprocess.Popen[bytes]:
    """The batch script of one job, as Slurm starts it on the first of its hosts."""
    commands = tmp_path / "bin"
    commands.mkdir(exist_ok=True)
    for name, text in FAKES.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[1-4]", "SLURM_NNODES": "4"}
    job |= {"SLURM_CPUS_PER_TASK": "16", "SCRATCH": str(tmp_path), "RAY_LOOK_EVERY_S": "0.1"}
    job |= {"LOG": str(tmp_path / "log"), "CHECKPOINT": str(tmp_path / "checkpoint")}
    job |= {"RAY_UP": str(tmp_path / "ray_up"), "PATH": f"{commands}:{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", str(DEPLOY / "slurm.sbatch"), "run.toml", "--epochs", "2"],
        env=os.environ | job | more,
        start_new_session=True,
    )


def ended(job: subprocess.Popen[bytes]) -> int:
    """Its exit code; Slurm then ends what it has left, as this does."""
    try:
        return job.wait(60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def test_a_slurm_job_writes_a_checkpoint_before_its_end_and_goes_on_when_queued_again(tmp_path):
    """USR1 comes to the batch shell alone, as `--signal=B:USR1@180` has it."""
    job = slurm_job(tmp_path)
    try:
        while not (tmp_path / "log.training").exists():
            assert job.poll() is None
            time.sleep(0.05)
    finally:
        job.send_signal(signal.SIGUSR1)
    assert ended(job) == 75 and (tmp_path / "checkpoint").exists()
    first = (tmp_path / "log").read_text()
    assert first.count("scontrol requeue 17") == 1
    steps = [line for line in first.splitlines() if line.startswith("srun")]
    assert ["--nodelist=node1" in steps[0], "--exclude=node1" in steps[1]] == [True, True]
    assert all("--cpus-per-task=16" in step for step in steps)
    assert ended(slurm_job(tmp_path)) == 0
    runs = [line for line in (tmp_path / "log").read_text().splitlines() if "train" in line]
    assert len(runs) == 2 and runs[0] == runs[1]
    assert f"--out {tmp_path}/runs/17 --resume auto --epochs 2" in runs[0]
    assert "--ray node1:6379 --cluster-wait-s 600" in runs[0]


def test_a_slurm_job_that_fails_is_not_queued_again(tmp_path):
    (tmp_path / "checkpoint").touch()
    assert ended(slurm_job(tmp_path, AT_THE_END="2")) == 2
    assert "requeue" not in (tmp_path / "log").read_text()


def test_in_a_step_of_slurm_the_one_driver_of_a_cluster_trains(monkeypatch, tmp_path):
    """`srun` says how many tasks the step has; without --ray each would train alone."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(ValueError, match="SLURM_STEP_NUM_TASKS is '4'"):
        run_command(["--out", str(tmp_path / "run")])
    with pytest.raises(ValueError, match=r"no Ray cluster is there|needs Ray"):
        run_command(["--ray", "127.0.0.1:1", "--servers", "1", "--out", str(tmp_path / "run")])


@pytest.mark.parametrize("name", ["ci.yml", "site.yml"])
def test_a_workflow_types_what_is_there(name):
    """Its commands are a file of the tree or a target of the Makefile."""
    workflow = yaml.load((WORKFLOWS / name).read_text(), yaml.BaseLoader)  # `on` is no bool
    assert workflow["on"]["push"]["branches"] == ["main"]
    assert "write" not in workflow["permissions"].get("contents", "")
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines()}
    commands = []
    for job in workflow["jobs"].values():
        assert int(job["timeout-minutes"]) > 0
        commands += [step["run"] for step in job["steps"] if "run" in step]
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
    assert commands
    for command in commands:
        *_, last = command.split()
        assert last in targets if " make " in f" {command} " else (ROOT / last).is_file()


def test_a_workflow_tries_each_python_that_the_package_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    workflow = yaml.safe_load((WORKFLOWS / "ci.yml").read_text())
    pythons = workflow["jobs"]["python"]["strategy"]["matrix"]["python"]
    assert project["requires-python"] == f">={pythons[0]}"
    assert ".ci/run" in workflow["jobs"]["check"]["steps"][-1]["run"]


NEVER_RAN = [JOB, DEPLOY / "Dockerfile", DEPLOY / "slurm.sbatch"]


@pytest.mark.parametrize("file", [*NEVER_RAN, *WORKFLOWS.iterdir()], ids=lambda file: file.name)
def test_what_never_ran_says_so(file):
    assert "Never ran" in file.read_text()
