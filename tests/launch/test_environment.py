"""What the environment says: launchers, nodes, ranks and meshes."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from amount import examples
from commands import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from ports import free_port
from trials import ROOT

import fsdpx
from fsdpx import Mesh, nn, optim
from fsdpx.core.base.config import PRESETS
from fsdpx.core.base.environment import (
    Environment,
    LauncherInfo,
    RendezvousStore,
    copy_without_rank_variables,
    read_environment,
    require_expected_world_size,
    require_single_process_and_get_note,
    set_rank_variables,
)
from fsdpx.core.comm.mesh import AXES
from fsdpx.errors import ConfigError, FsdpxError, LaunchError, MeshError
from fsdpx.launch.options import NodeRank
from fsdpx.launch.show import format_mesh, parse_recompute, require_axes_for_options
from fsdpx.launch.verify import fill_in_mesh_widths

PMI = "mpiexec or srun with PMI (PMI_SIZE)"


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, None),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, 3),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),  # a batch script
        ({"SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}, 8),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, 2),
        ({"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "PMI_SIZE": "4"}, 4),  # mpiexec in a job: the daemon's variables
        ({"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "PMI_RANK": "0"}, None),
        ({"SLURM_NTASKS": "8"}, None),  # a shell of salloc
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}, None),  # an interactive step's
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "3"}, 8),
        ({"MV2_COMM_WORLD_SIZE": "6", "MV2_COMM_WORLD_RANK": "5"}, 6),
        ({"PMI_SIZE": "4", "FSDPX_EXPECT_SIZE": "5"}, 5),
        ({"FSDPX_EXPECT_SIZE": "1"}, 1),
    ],
)
def test_expected_size(environ, size):
    found = read_environment(environ)
    assert found.expected_size == size
    assert (found.launcher is None) == (size is None)


@pytest.mark.parametrize("more", [{}, {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, {"FSDPX_STORE": "file"}])
def test_a_script_may_read_its_rank_and_it_stays_a_rank_of_mpi(more):
    environ = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1", **more}
    found = read_environment(environ)
    set_rank_variables(found.launcher, found.expected_size, environ)
    named = {name: environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    assert set(named.values()) == {None} if "FSDPX_STORE" in more else list(named.values()) == ["3", "1", "4"]
    assert read_environment(environ) == found


def test_a_launcher_that_says_only_which_rank_this_is():
    found = read_environment({"PMI_RANK": "1"})
    assert found.launcher == LauncherInfo(PMI, rank=1, variable="PMI_RANK")
    require_expected_world_size(2, found)
    with pytest.raises(LaunchError, match=r"this rank was started without the others: .* says 2 ranks"):
        require_expected_world_size(1, found)


ALONE = r"without the others: mpiexec of Open MPI \(OMPI_COMM_WORLD_SIZE\) says 4 ranks, but MPI says 1"
ALONE += ".* Start with .*mpiexec"


@pytest.mark.parametrize(
    ("environ", "size", "said"),
    [
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "FSDPX_EXPECT_SIZE": "4"}, 2,
         r"^FSDPX_EXPECT_SIZE says 4 ranks, but mpiexec or srun with PMI \(PMI_SIZE\) and MPI say 2: start 4 ranks, "
         "or unset FSDPX_EXPECT_SIZE$"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "FSDPX_EXPECT_SIZE": "4"}, 1,
         "started without the others: FSDPX_EXPECT_SIZE says 4 ranks, but MPI says 1"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 1, ALONE),
        ({"OMPI_COMM_WORLD_SIZE": "4", "FSDPX_EXPECT_SIZE": "4"}, 1, ALONE),
    ],
)  # fmt: skip
def test_the_variable_that_is_wrong_is_named(environ: dict[str, str], size: int, said: str) -> None:
    found = read_environment(environ)
    require_expected_world_size(found.expected_size, found)
    with pytest.raises(LaunchError, match=said):
        require_expected_world_size(size, found)


def test_what_is_known_of_ranks_on_this_host():
    said = {"PMI_SIZE": "6", "PMI_RANK": "5", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
    assert read_environment(said).launcher == LauncherInfo(PMI, 6, 5, 2, 3, "PMI_RANK")
    said = {f"OMPI_COMM_WORLD_{name}": n for name, n in (("SIZE", "6"), ("RANK", "5"), ("LOCAL_RANK", "2"))}
    open_mpi = "mpiexec of Open MPI (OMPI_COMM_WORLD_SIZE)"
    assert read_environment(said).launcher == LauncherInfo(open_mpi, 6, 5, 2, None, "OMPI_COMM_WORLD_RANK")
    said = {"SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    assert read_environment(said).launcher == LauncherInfo("srun (SLURM_STEP_NUM_TASKS)", 4, 3, 1, None, "SLURM_PROCID")


def test_variables_of_torchrun_mean_one_of_several():
    with pytest.raises(LaunchError) as caught:
        require_single_process_and_get_note({"RANK": "1", "WORLD_SIZE": "2"})
    assert "RANK=1 and WORLD_SIZE=2 say that this process is one of 2, as torchrun sets them" in str(caught.value)
    assert "mpiexec -n 2 python ... (or srun), or unset RANK and WORLD_SIZE" in str(caught.value)
    assert "without MASTER_ADDR and MASTER_PORT (from 1 to 65535) it cannot meet the others" in str(caught.value)
    assert "fsdpx.init(backend='local')" in str(caught.value)


def test_ranks_without_mpi_are_found_below_a_launcher_of_mpi_and_inside_it():
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29400"}
    store = RendezvousStore("n1", 29400)
    without = LauncherInfo("ranks without MPI (WORLD_SIZE)", 2, 1, variable="RANK", mpi=False, store=store)
    assert read_environment(by_hand).launcher == without
    mpi = {"PMI_SIZE": "4", "PMI_RANK": "3"}
    assert read_environment(by_hand | mpi).launcher == LauncherInfo(PMI, 4, 3, variable="PMI_RANK", store=store)
    torchrun = {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    found = read_environment(by_hand | mpi | torchrun)
    assert (found.launcher.name, found.launcher.local_rank) == ("torchrun (WORLD_SIZE)", 0)
    assert found.launcher.store == RendezvousStore("n1", 29400, served=True)
    assert found.expected_size == 2
    assert read_environment({"RANK": "0", "WORLD_SIZE": "1", "FSDPX_STORE": "s"}).launcher is not None
    assert copy_without_rank_variables(by_hand | torchrun | {"FSDPX_STORE": "s", "LOCAL_WORLD_SIZE": "1"}) == {}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "2"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "4"},
    ],
)
def test_a_process_alone_is_no_error(environ):
    assert require_single_process_and_get_note(environ) == ""


def test_a_process_alone_in_a_job_of_several_tasks_goes_on_with_a_note():
    """A batch script may start several independent processes, an interactive shell may try something."""
    note = require_single_process_and_get_note({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"})
    assert note == "this process is alone, in a Slurm job of 8 tasks: srun or mpiexec starts all of them"


def test_settings():
    assert read_environment({}) == Environment()
    found = read_environment({"FSDPX_CHECK": "1", "FSDPX_TIMEOUT": "2.5"})
    assert (found.check, found.timeout) == (True, 2.5)
    assert not read_environment({"FSDPX_CHECK": "0"}).check


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("FSDPX_CHECK", "maybe", "FSDPX_CHECK='maybe' is neither yes nor no"),
        ("FSDPX_TUNE", "anew", "FSDPX_TUNE='anew' is neither yes nor no"),
        ("FSDPX_EXPECT_SIZE", "four", "FSDPX_EXPECT_SIZE='four' is not a number of ranks"),
        ("PMI_SIZE", "0", "PMI_SIZE='0' is not a number of ranks"),
        ("FSDPX_TIMEOUT", "-1", "FSDPX_TIMEOUT='-1' is not a time"),
        ("FSDPX_START_TIMEOUT", "0", "FSDPX_START_TIMEOUT='0' is not a time"),
        ("FSDPX_TIMEOUT", "soon", "FSDPX_TIMEOUT='soon' is not a time"),
    ],
)
def test_what_cannot_be_read_is_named(variable, value, words):
    with pytest.raises(LaunchError, match=words):
        read_environment({variable: value})


def test_again_means_measure_anew_but_not_after_a_restart():
    assert (read_environment({}).tune, read_environment({}).retune) == (True, False)
    for value, chosen in (("0", (False, False)), ("Again", (True, True))):
        found = read_environment({"FSDPX_TUNE": value})
        assert (found.tune, found.retune) == chosen
    assert not read_environment({"FSDPX_TUNE": "again", "FSDPX_RESTART": "1"}).retune


def test_a_process_that_is_asked_something_is_no_rank_of_this_job():
    kept = {"PATH": "/bin", "FSDPX_CACHE": "/cache", "OMP_NUM_THREADS": "2"}
    of_jobs = {"PMI_RANK": "1", "PMIX_RANK": "1", "OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "1", "FSDPX_RUN": "/tmp"}
    assert copy_without_rank_variables(kept | of_jobs) == kept


SECRET = "one secret of many, for tests"
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


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
def test_options_that_do_not_fit_are_named(words: str, said: str) -> None:
    assert said in refused(f"run {words} train.py")


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
    assert node.make_local_launcher_options(4) == ["--first", "4", "--of", "12"]
    assert node.make_rendezvous_environment(1, 4) == {"FSDPX_STORE": "tcp://n1:65535", "FSDPX_EXPECT_SIZE": "12"}
    with pytest.raises(LaunchError, match=r"restart 2 would meet at port 65536; take a lower one"):
        node.make_rendezvous_environment(2, 4)


def test_a_port_of_a_host_is_a_place_to_meet() -> None:
    """Also inside a job step of Slurm, whose variables mean other ranks."""
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}
    found = read_environment({**ranks, "FSDPX_STORE": "tcp://n1:70"}).launcher
    assert (found.rank, found.mpi, found.store) == (1, False, RendezvousStore("n1", 70))
    with pytest.raises(LaunchError, match=r"FSDPX_STORE=tcp://n1 names no port: tcp://HOST:PORT is needed"):
        read_environment({**ranks, "FSDPX_STORE": "tcp://n1"})


TRAINS = """
import os, numpy as np, fsdpx
from fsdpx import nn, optim
from fsdpx.examples import models

comm = fsdpx.init()
trainer = models.make_mlp(1, 8).as_distributed(loss=nn.CrossEntropyLoss(), optimizer=optim.SGD(lr=0.1), strategy="fsdp")
for step in range(3):
    if os.environ["FSDPX_RESTART"] == "0" and step == 1 and comm.rank == comm.size - 1:
        os.kill(os.getpid(), 9)
    trainer.step(np.ones((4, 8), np.float32), np.zeros(4, np.int64))
digest = trainer.inspect.compute_fingerprint()
print(f"rank {comm.rank} of {comm.size}: LOCAL_RANK={os.environ['LOCAL_RANK']} {digest}\\n", end="")
"""


def begin(folder: Path, node_rank: int, *words: str) -> subprocess.Popen[str]:
    """The launcher of `job.py` on one of two hosts."""
    own = {"PYTHONPATH": str(ROOT), "FSDPX_SECRET": SECRET, "FSDPX_TUNE": "0", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "fsdpx", "run", "--backend", "gloo", "--nodes", "2", "--master-addr", "127.0.0.1",
         "--node-rank", str(node_rank), *words, "job.py"],
        env=copy_without_rank_variables() | own | {"FSDPX_TIMEOUT": "250"}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
    )  # fmt: skip


def places(text: str) -> list[tuple[str, ...]]:
    return sorted(re.findall(r"^rank (\d) of (\d): LOCAL_RANK=(\d)", text, re.M))


@pytest.mark.jobs
@needs_torch
def test_two_launchers_train_one_model_and_start_again_after_a_death(tmp_path: Path) -> None:
    """Two launchers train one model; ranks of the other host end by what they are told of a death, not by timeout."""
    (tmp_path / "job.py").write_text(TRAINS)
    words = ["--master-port", str(free_port()), "--nproc-per-node", "1", "--max-restarts", "1"]
    started = [begin(tmp_path, number, *words) for number in (1, 0)]
    second, first = (one.communicate(timeout=280)[0] for one in started)
    assert [one.returncode for one in started] == [0, 0], first + second
    assert "restart 1 of 1" in first
    assert re.search(r"fsdpx run: rank 1 on .*; restart 1 of 1", second), second
    assert len(set(re.findall(r"LOCAL_RANK=\d (\w+)$", first + second, re.M))) == 1
    assert places(first) == [("0", "2", "0")]
    assert places(second) == [("1", "2", "0")]


@pytest.mark.jobs
@needs_torch
def test_a_host_numbers_its_ranks_after_those_of_the_host_before(tmp_path: Path) -> None:
    """Its script does not meet the others, so it imports no PyTorch, but the launcher asks for it."""
    (tmp_path / "job.py").write_text(
        "import os\nprint('rank {RANK} of {WORLD_SIZE}: LOCAL_RANK={LOCAL_RANK}\\n'.format(**os.environ), end='')\n"
    )
    started = begin(tmp_path, 1, "--master-port", "23456", "--nproc-per-node", "2")
    text, _ = started.communicate(timeout=60)
    assert started.returncode == 0, text
    assert places(text) == [("2", "4", "0"), ("3", "4", "1")]


@given(st.dictionaries(st.sampled_from(AXES), st.integers(1, 40)).filter(len), st.sampled_from(["", " "]))
@settings(derandomize=True, database=None, deadline=None, max_examples=examples(40))
def test_what_is_written_is_read(widths: dict[str, int], blank: str) -> None:
    text = f",{blank}".join(f"{axis}{blank}={blank}{width}" for axis, width in widths.items())
    assert Mesh.parse(text) == Mesh(**widths)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipes=2", "--mesh pipes=2: the axes are pipe, replica, shard, tensor, for example pipe=2,tensor=2"),
        ("", "--mesh : the axes are pipe"),
        ("pipe=2,", "--mesh pipe=2,: the axes are pipe"),
        ("pipe=0", "--mesh pipe=0: pipe=0 must be a number of ranks, at least 1"),
        ("pipe", "--mesh pipe: pipe= must be a number of ranks, at least 1"),
        ("tensor=two", "tensor=two must be a number of ranks"),
        ("pipe=2,pipe=2", "--mesh pipe=2,pipe=2: pipe is named twice"),
    ],
)
def test_mistakes_name_what_was_written(text: str, message: str) -> None:
    with pytest.raises(MeshError, match=re.escape(message)):
        Mesh.parse(text)


@pytest.mark.parametrize("strategy", PRESETS)
@pytest.mark.parametrize("text", ["pipe=2", "tensor=2", "replica=2", "shard=2,tensor=2", "pipe=2,tensor=4"])
def test_filled_as_the_engine_fills_it(text: str, strategy: str) -> None:
    """Or refused for the same reason."""

    def there():
        trainer = nn.GPT(31, 16, 2, 4, 8).as_distributed(
            loss=nn.CrossEntropyLoss(), optimizer=optim.SGD(lr=0.1), strategy=strategy, mesh=Mesh.parse(text),
            comm=fsdpx.FakeCommunicator(0, 8), device="shape",
        )  # fmt: skip
        return trainer.inspect.placement.axes.mesh

    def outcome(make):
        try:
            return str(make())
        except FsdpxError as error:
            return str(error)

    want = outcome(there)
    if "wants a shard axis" not in want:  # that a mesh contradicts the strategy is the engine's to say
        assert outcome(lambda: Mesh.parse(text).fill_from_strategy(strategy, 8)) == want


def test_strategies_without_shards_have_all_data_ranks_as_replicas() -> None:
    mesh = Mesh.parse("shard=2,pipe=2,tensor=2")
    assert fill_in_mesh_widths(mesh, "ddp", 8) == Mesh(replica=2, shard=1, pipe=2, tensor=2)
    assert fill_in_mesh_widths(mesh, "zero2", 8) == Mesh(shard=2, pipe=2, tensor=2)
    assert fill_in_mesh_widths(Mesh.parse("pipe=2"), "hybrid", 8) == Mesh(replica=2, shard=2, pipe=2)
    assert format_mesh(fill_in_mesh_widths(Mesh.parse("pipe=2"), "ddp", 8)) == "pipe=2 x replica=4"
    assert format_mesh(Mesh(shard=1)) == "one rank"


@pytest.mark.parametrize(
    ("mesh", "schedule", "sequence", "message"),
    [
        (None, "zbv", None, "--schedule zbv: the mesh has no pipe axis; say --mesh pipe=2"),
        (Mesh(tensor=2), "all", None, "--schedule all: the mesh has no pipe axis"),
        (Mesh(pipe=2), "all", "ring", "--sequence ring: the mesh has no tensor axis; say --mesh tensor=2"),
        (None, None, "all", "--sequence all: the mesh has no tensor axis"),
    ],
)
def test_what_would_mean_nothing_is_refused(mesh, schedule, sequence, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        require_axes_for_options(mesh, schedule, sequence)


def test_recompute_is_a_number_or_a_word() -> None:
    assert [parse_recompute(text) for text in (None, "all", "2", "512MiB")] == [None, "all", 2, "512MiB"]
