"""`fsdpx run --backend gloo --nodes --node-rank --master-addr`: the same line on each host, ranks without MPI."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpx.__main__ import main
from fsdpx.environment import Store, alone, read
from fsdpx.errors import LaunchError
from fsdpx.launch.options import NodeRank

ROOT = Path(__file__).parents[2]
SECRET = "one secret of many, for tests"
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
GLOO = ("--backend", "gloo", "--nodes", "2", "--master-addr", "127.0.0.1")


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDPX_SECRET", SECRET)


@pytest.mark.usefixtures("secret")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-n 4 --node-rank 0", "--node-rank, --master-addr and --master-port are for --backend gloo: MPI's launcher"),
        ("-n 4 --master-port 1", "are for --backend gloo"),
        ("-n 4 --backend gloo --nodes 2", "--node-rank and --master-addr are missing. Start the same line on each"),
        ("-n 4 --backend gloo --node-rank 0 --master-addr a", "several hosts: --nodes is missing"),
        ("-n 4 --backend gloo --nodes 2 --master-port 1", "--node-rank and --master-addr are missing"),
        ("-n 4 --backend gloo --nodes 2 --node-rank 2 --master-addr a", "--node-rank 2: hosts are numbered from 0"),
        ("-n 4 --backend gloo --nodes 2 --node-rank -1 --master-addr a", "--node-rank -1: hosts are numbered from 0"),
        ("-n 4 --backend gloo --nodes 2 --node-rank 0 --master-addr a --master-port 70000", "from 1 to 65535"),
        ("-n 5 --backend gloo --nodes 2 --node-rank 0 --master-addr a", "-n 5 on --nodes 2: each host has the same"),
        (
            "-n 4 --nproc-per-node 1 --backend gloo --nodes 2 --node-rank 0 --master-addr a",
            "-n 4 on --nodes 2 with --nproc-per-node 1: each host has the same",
        ),
        ("--backend gloo --nodes 2 --node-rank 0 --master-addr a", "how many ranks on 2 hosts"),
        ("-n 4 --min-ranks 2 --backend gloo --nodes 2 --node-rank 0 --master-addr a", "--min-ranks with --node-rank"),
        ("-n 4 --print-batch slurm --backend gloo --nodes 2 --node-rank 0 --master-addr a", "--print-batch with"),
        ("-n 4 --hostfile h --backend gloo --nodes 2 --node-rank 0 --master-addr a", "leave hostfile out"),
        ("-n 4 --elastic --backend gloo --nodes 2 --node-rank 0 --master-addr a", "leave elastic out"),
    ],
)
def test_options_that_do_not_fit_are_named(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words.split(), "train.py"]) == 2
    assert said in capsys.readouterr().err


def test_the_secret_must_be_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host would make another one."""
    monkeypatch.delenv("FSDPX_SECRET", raising=False)
    with pytest.raises(LaunchError, match=r"FSDPX_SECRET is not set.*openssl rand -hex 32.*the same on all hosts"):
        NodeRank(2, 0, "n1")
    monkeypatch.setenv("FSDPX_SECRET", "short")
    with pytest.raises(LaunchError, match=r"FSDPX_SECRET has 5 characters"):
        NodeRank(2, 0, "n1")


@pytest.mark.usefixtures("secret")
def test_where_ranks_meet_is_a_port_of_its_own_for_each_start() -> None:
    node = NodeRank(3, 1, "n1", 65534)
    assert node.words(4) == ["--first", "4", "--of", "12"]
    assert node.variables(1, 4) == {"FSDPX_STORE": "tcp://n1:65535", "FSDPX_EXPECT_SIZE": "12"}
    with pytest.raises(LaunchError, match=r"restart 2 would meet at port 65536; take a lower one"):
        node.variables(2, 4)


def test_a_port_of_a_host_is_a_place_to_meet() -> None:
    """Also inside a job step of Slurm, whose variables mean other ranks."""
    variables = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "FSDPX_STORE": "tcp://n1:70",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
    }
    found = read(variables).launcher
    assert found is not None
    assert (found.rank, found.mpi, found.store) == (1, False, Store("n1", 70))
    with pytest.raises(LaunchError, match=r"FSDPX_STORE=tcp://n1 names no port: tcp://HOST:PORT is needed"):
        read({**variables, "FSDPX_STORE": "tcp://n1"})


TRAINS = """
import os, sys, numpy as np, fsdpx
from fsdpx import nn, optim
from fsdpx.nn import models

comm = fsdpx.init()
trainer = models.mlp(1, 8).as_distributed(loss=nn.CrossEntropy(), optimizer=optim.SGD(lr=0.1), strategy="fsdp")
for step in range(3):
    if sys.argv[1] == "dies" and os.environ["FSDPX_RESTART"] == "0" and step == 1 and comm.rank == 3:
        os.kill(os.getpid(), 9)
    trainer.step(np.ones((4, 8), np.float32), np.zeros(4, np.int64))
digest = trainer.inspect.fingerprint()
print(f"rank {comm.rank} of {comm.size}: LOCAL_RANK={os.environ['LOCAL_RANK']} {digest}\\n", end="")
"""


def free_port() -> int:
    """With the next one free as well, for a restart."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            if port < 65535 and other.connect_ex(("127.0.0.1", port + 1)):
                return port


def two_hosts(folder: Path, *words: str, restarts: int = 0, **variables: str) -> list[tuple[int, str]]:
    """The status of each of two launchers with two ranks each, and what it has printed."""
    (folder / "train.py").write_text(TRAINS)
    own = {"PYTHONPATH": str(ROOT), "FSDPX_SECRET": SECRET, "FSDPX_TUNE": "0", "OPENBLAS_NUM_THREADS": "1", **variables}
    line = [*GLOO, "--master-port", str(free_port()), "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "fsdpx", "run", *line, "--node-rank", str(number), "train.py", *words],
            env=alone() | own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=folder,
        )
        for number in (1, 0)
    ]  # fmt: skip
    said = [one.communicate(timeout=280)[0] for one in started]
    return [(one.returncode, text) for one, text in zip(started, said, strict=True)][::-1]


def places(text: str) -> list[tuple[str, ...]]:
    return sorted(re.findall(r"^rank (\d) of (\d): LOCAL_RANK=(\d)", text, re.M))


def prints(*texts: str) -> set[str]:
    return set(re.findall(r"LOCAL_RANK=\d (\w+)$", "".join(texts), re.M))


@pytest.mark.jobs
@needs_torch
def test_two_launchers_train_one_model(tmp_path: Path) -> None:
    (status, first), (other, second) = two_hosts(tmp_path, "lives")
    assert (status, other) == (0, 0), first + second
    assert places(first) == [("0", "4", "0"), ("1", "4", "1")]
    assert places(second) == [("2", "4", "0"), ("3", "4", "1")]
    assert len(prints(first, second)) == 1


@pytest.mark.jobs
@needs_torch
def test_the_death_of_a_rank_ends_those_of_the_other_host_by_name(tmp_path: Path) -> None:
    (status, first), (other, second) = two_hosts(tmp_path, "dies", FSDPX_TIMEOUT="250")
    assert status not in (0, 124), first  # 124: it would have waited until the timeout
    assert other not in (0, 124), second
    assert re.search(r"rank 3( on \S+)? (is gone|has ended|died|was killed)", first), first
    assert "fsdpx run: rank 3 on" in second, second


@pytest.mark.jobs
@needs_torch
def test_after_a_death_all_hosts_start_again(tmp_path: Path) -> None:
    (status, first), (other, second) = two_hosts(tmp_path, "dies", restarts=1)
    assert (status, other) == (0, 0), first + second
    assert "restart 1 of 1" in first
    assert "restart 1 of 1" in second
    assert len(prints(first, second)) == 1
    assert places(first) + places(second) == [(str(rank), "4", str(rank % 2)) for rank in range(4)]


@pytest.mark.jobs
@needs_torch
def test_a_host_with_another_secret_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('RANK') == '2': os.environ['FSDPX_SECRET'] = 'another, of a stranger'\n"
    )
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    (status, first), (_, _) = two_hosts(tmp_path, "lives", PYTHONPATH=path, FSDPX_START_TIMEOUT="15")
    assert status, first
    assert "who came as rank 2 does not know the FSDPX_SECRET of this job" in first
