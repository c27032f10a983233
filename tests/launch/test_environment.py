"""The number of ranks that each launcher sets, and the error when MPI disagrees."""

from __future__ import annotations

import pytest

from fsdpx.environment import Environment, alone, check_size, read
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
        ({"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "PMI_RANK": "1"}, None),
        ({"PMI_SIZE": "4", "FSDPX_EXPECT_SIZE": "5"}, 5),
        ({"FSDPX_EXPECT_SIZE": "1"}, 1),
    ],
)
def test_expected_size(environ, size):
    found = read(environ)
    assert found.expected_size == size
    assert (found.launcher is None) == (size is None)


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
