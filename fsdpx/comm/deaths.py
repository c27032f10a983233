"""MPI's knowledge of ranks that have died: user-level failure mitigation (Bland et al. 2013), as Open MPI 5 has it."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache

from mpi4py import MPI

from fsdpx import environment

__all__ = ["DEATHS", "finalize_without_the_dead", "lost", "ulfm_active"]

DEATHS = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED} - {MPI.ERR_UNKNOWN}
"""Classes of errors that report a death; none where the MPI library has no user-level failure mitigation."""


@cache
def ulfm_active() -> bool:
    """Whether this job outlives its ranks: Open MPI, started with `mpiexec --with-ft ulfm`. Elsewhere the launcher ends
    the job when a rank dies; MPICH does so even with -disable-auto-cleanup."""
    return "Open MPI" in MPI.Get_library_version() and environment.read().ulfm


def lost(comm: MPI.Intracomm) -> tuple[int, ...]:
    """Ranks of `comm` that MPI knows here to be dead."""
    if not DEATHS:
        return ()
    failed, everyone = comm.Get_failed(), comm.Get_group()
    ranks = MPI.Group.Translate_ranks(failed, None, everyone)
    failed.Free()
    everyone.Free()
    return tuple(sorted(ranks))


def finalize_without_the_dead() -> None:
    """From now on this process ends without a barrier in MPI_Finalize: the launcher of Open MPI 5.0 sometimes counts
    ranks that died at about the same time among those that others wait for there, and the job never ends. The same as
    OMPI_MCA_async_mpi_finalize=1, which would have to be known before MPI is initialized."""
    with suppress(ValueError, OSError):  # another version: nothing by that name
        ctypes.c_bool.in_dll(ctypes.CDLL(MPI.__file__), "ompi_async_mpi_finalize").value = True
