"""The number of ranks that each launcher sets, and the error when MPI disagrees."""

from __future__ import annotations

import pytest

from fsdpx.environment import Environment, StartedBy, Store, alone, check_alone, check_size, number, read
from fsdpx.errors import LaunchError


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, None),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, 3),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),  # a batch script
        ({"SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}, 8),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, 2),
        (
            {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "PMI_SIZE": "4"},
            4,
        ),  # mpiexec in a job: the daemon's variables
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
    found = read(environ)
    assert found.expected_size == size
    assert (found.launcher is None) == (size is None)


@pytest.mark.parametrize("more", [{}, {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, {"FSDPX_STORE": "file"}])
def test_a_script_may_read_its_rank_and_it_stays_a_rank_of_mpi(more):
    environ = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1", **more}
    found = read(environ)
    number(found.launcher, found.expected_size, environ)
    named = {name: environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    assert set(named.values()) == {None} if "FSDPX_STORE" in more else list(named.values()) == ["3", "1", "4"]
    assert read(environ) == found


def test_a_launcher_that_says_only_which_rank_this_is():
    found = read({"PMI_RANK": "1"})
    assert found.launcher == StartedBy("mpiexec or srun with PMI (PMI_SIZE)", rank=1, variable="PMI_RANK")
    check_size(2, found)
    with pytest.raises(LaunchError, match=r"this rank was started without the others: .* says 2 ranks"):
        check_size(1, found)


def test_what_is_known_of_ranks_on_this_host():
    said = {"PMI_SIZE": "6", "PMI_RANK": "5", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
    assert read(said).launcher == StartedBy("mpiexec or srun with PMI (PMI_SIZE)", 6, 5, 2, 3, "PMI_RANK")
    said = {f"OMPI_COMM_WORLD_{name}": n for name, n in (("SIZE", "6"), ("RANK", "5"), ("LOCAL_RANK", "2"))}
    assert read(said).launcher == StartedBy(
        "mpiexec of Open MPI (OMPI_COMM_WORLD_SIZE)", 6, 5, 2, None, "OMPI_COMM_WORLD_RANK"
    )
    said = {"SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    assert read(said).launcher == StartedBy("srun (SLURM_STEP_NUM_TASKS)", 4, 3, 1, None, "SLURM_PROCID")


def test_variables_of_torchrun_mean_one_of_several():
    with pytest.raises(LaunchError) as caught:
        check_alone({"RANK": "1", "WORLD_SIZE": "2"})
    assert "RANK=1 and WORLD_SIZE=2 say that this process is one of 2, as torchrun sets them" in str(caught.value)
    assert "mpiexec -n 2 python ... (or srun), or unset RANK and WORLD_SIZE" in str(caught.value)
    assert "without MASTER_ADDR and MASTER_PORT (from 1 to 65535) it cannot meet the others" in str(caught.value)
    assert "fsdpx.init(backend='local')" in str(caught.value)


def test_ranks_without_mpi_are_found_below_a_launcher_of_mpi_and_inside_it():
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29400"}
    store = Store("n1", 29400)
    assert read(by_hand).launcher == StartedBy(
        "ranks without MPI (WORLD_SIZE)", 2, 1, variable="RANK", mpi=False, store=store
    )
    mpi = {"PMI_SIZE": "4", "PMI_RANK": "3"}
    assert read(by_hand | mpi).launcher == StartedBy(
        "mpiexec or srun with PMI (PMI_SIZE)", 4, 3, variable="PMI_RANK", store=store
    )
    torchrun = {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    found = read(by_hand | mpi | torchrun)
    assert found.launcher is not None
    assert (found.launcher.name, found.launcher.local_rank) == ("torchrun (WORLD_SIZE)", 0)
    assert found.launcher.store == Store("n1", 29400, served=True)
    assert found.expected_size == 2
    assert read({"RANK": "0", "WORLD_SIZE": "1", "FSDPX_STORE": "s"}).launcher is not None
    assert alone(by_hand | torchrun | {"FSDPX_STORE": "s", "LOCAL_WORLD_SIZE": "1"}) == {}


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
    assert check_alone(environ) == ""


def test_a_process_alone_in_a_job_of_several_tasks_goes_on_with_a_note():
    """A batch script may start several independent processes, an interactive shell may try something."""
    note = check_alone({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"})
    assert note == "this process is alone, in a Slurm job of 8 tasks: srun or mpiexec starts all of them"


def test_settings():
    assert read({}) == Environment()
    found = read({"FSDPX_CHECK": "1", "FSDPX_TIMEOUT": "2.5"})
    assert (found.check, found.timeout) == (True, 2.5)
    assert not read({"FSDPX_CHECK": "0"}).check


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("FSDPX_CHECK", "maybe", "FSDPX_CHECK='maybe' is neither yes nor no"),
        ("FSDPX_EXPECT_SIZE", "four", "FSDPX_EXPECT_SIZE='four' is not a number of ranks"),
        ("PMI_SIZE", "0", "PMI_SIZE='0' is not a number of ranks"),
        ("FSDPX_TIMEOUT", "-1", "FSDPX_TIMEOUT='-1' is not a time"),
        ("FSDPX_START_TIMEOUT", "0", "FSDPX_START_TIMEOUT='0' is not a time"),
        ("FSDPX_TIMEOUT", "soon", "FSDPX_TIMEOUT='soon' is not a time"),
    ],
)
def test_what_cannot_be_read_is_named(variable, value, words):
    with pytest.raises(LaunchError, match=words):
        read({variable: value})


def test_sizes_that_disagree():
    check_size(4, read({"PMI_SIZE": "4"}))
    check_size(4, read({}))
    with pytest.raises(LaunchError) as caught:
        check_size(1, read({"OMPI_COMM_WORLD_SIZE": "4"}), "MPI (MPICH 5)")
    message = str(caught.value)
    assert "started without the others: mpiexec of Open MPI (OMPI_COMM_WORLD_SIZE) says 4 ranks" in message
    assert "MPI (MPICH 5) says 1" in message
    assert "mpiexec" in message.split("Start with")[1]


def test_again_means_measure_anew_but_not_after_a_restart():
    assert (read({}).tune, read({}).retune) == (True, False)
    assert (read({"FSDPX_TUNE": "0"}).tune, read({"FSDPX_TUNE": "0"}).retune) == (False, False)
    assert (read({"FSDPX_TUNE": "Again"}).tune, read({"FSDPX_TUNE": "Again"}).retune) == (True, True)
    assert not read({"FSDPX_TUNE": "again", "FSDPX_RESTART": "1"}).retune
    with pytest.raises(LaunchError, match="FSDPX_TUNE='anew' is neither yes nor no"):
        read({"FSDPX_TUNE": "anew"})


def test_a_process_that_is_asked_something_is_no_rank_of_this_job():
    kept = {"PATH": "/bin", "FSDPX_CACHE": "/cache", "OMP_NUM_THREADS": "2"}
    of_jobs = {"PMI_RANK": "1", "PMIX_RANK": "1", "OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "1", "FSDPX_RUN": "/tmp"}
    assert alone(kept | of_jobs) == kept
