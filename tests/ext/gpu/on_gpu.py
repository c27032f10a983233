"""A communicator whose suite of tests, written for arrays of the host, reaches it with arrays of a GPU."""

from __future__ import annotations

import numpy as np
from stand_in import ndarray

from fsdpx.core.comm.calls import Call, Handle
from fsdpx.core.comm.communicator import CommunicatorWrapper

__all__ = ["OnGpu"]


class OnGpu(CommunicatorWrapper):
    """Arrays of the host are given on as if their memory were a GPU's."""

    def issue(self, call: Call) -> Handle:
        given = call.arrays
        return self.comm.issue(call.with_arrays(tuple(ndarray(a) if isinstance(a, np.ndarray) else a for a in given)))
