"""The child job that finds out whether MPI moves and adds arrays of a GPU: if it cannot, this is what it crashes."""

from __future__ import annotations

import sys

from fsdpx.cuda import devices

__all__ = ["WORKED", "main"]

ELEMENTS = 1 << 18
WORKED = "fsdpx: MPI has moved and added arrays of a GPU"


def main() -> int:
    from mpi4py import MPI

    comm, cupy = MPI.COMM_WORLD, devices.cupy()
    devices.take(comm.rank % len(devices.gpus()))
    mine = cupy.full(ELEMENTS, comm.rank + 1.0, dtype="float32")
    theirs, total = cupy.zeros_like(mine), mine[:1024].copy()
    cupy.cuda.get_current_stream().synchronize()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.Sendrecv(mine, right, recvbuf=theirs, source=left)
    comm.Allreduce(MPI.IN_PLACE, total)
    want = (left + 1.0, comm.size * (comm.size + 1) / 2)
    good = bool((theirs == want[0]).all()) and bool((total == want[1]).all())
    if comm.allreduce(good, MPI.LAND) and comm.rank == 0:
        print(f"{WORKED}, {comm.size} ranks", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
