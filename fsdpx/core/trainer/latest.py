"""`latest_checkpoint`: the checkpoint that a training loop resumes from."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from fsdpx.core.checkpoint.atomic_commit import agree_on_path, run_on_rank0
from fsdpx.core.checkpoint.newest import find_newest_checkpoint
from fsdpx.core.checkpoint.write import is_checkpoint
from fsdpx.core.comm.backend import FakeCommunicator
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.default_communicator import get_rank_info as place_of_process
from fsdpx.core.comm.default_communicator import require_valid_intracomm, to_mpi4py
from fsdpx.core.trainer.batch import agree_on_call
from fsdpx.core.trainer.initialize import default_communicator
from fsdpx.errors import CheckpointError

__all__ = ["latest_checkpoint"]


def latest_checkpoint(folder: str | PathLike[str], comm: Any = None) -> Path | None:
    """Return the newest complete checkpoint in a folder, for `trainer.load`; None if there is none yet.

    Collective over `comm`: rank 0 searches, and all ranks get its result. The newest checkpoint is the one with the
    largest number in its name: `step-100` is newer than `step-20`. If these numbers are equal or missing, the
    checkpoint written last is the newest. Files left by an interrupted save are ignored. A checkpoint with missing or
    truncated files is skipped with a warning. Digests are checked only by `load`. Checkpoints that hold only weights,
    as written by `save(weights="average")`, are skipped as well.

    Parameters
    ----------
    folder : folder that holds the checkpoints; it need not exist yet
    comm : communicator of the calling ranks, such as `trainer.call_runner.world` or an mpi4py communicator (default:
        the default communicator)

    Returns
    -------
    Path : path of the checkpoint, in `folder`

    Raises
    ------
    CheckpointError : on all ranks, if ranks pass different folders, or the folder cannot be read or is itself a
        checkpoint
    """
    comm = to_mpi4py(comm)
    require_valid_intracomm(comm)
    if comm is None:
        comm = default_communicator() if place_of_process().size > 1 else FakeCommunicator(0, 1)
    # compare calls first, so that if ranks make different calls, the error names these calls
    if isinstance(comm, Communicator):
        agree_on_call(comm, "latest_checkpoint")
    path = agree_on_path(comm, "latest_checkpoint", folder)

    def find_on_rank0() -> Path | None:
        if is_checkpoint(path):
            raise CheckpointError(f"{path} is a checkpoint itself: give the folder that contains it")
        return find_newest_checkpoint(path)

    return run_on_rank0(comm, f"latest_checkpoint of {path}", find_on_rank0)
