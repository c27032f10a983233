"""How fast and how large is the training of one and the same `torch.nn.Module` by fsdpx and by PyTorch?

    python bench/modules.py [--models small] [--rounds 6] [--seconds 1] [--quick]

Measured as in `side_by_side.py`, which says what takes turns with what. "fsdpx-module" is PyTorch's model, cut into its
blocks by `fsdpx.ext.interop.torch.from_torch`; PyTorch's own jobs are FSDP2 and DDP over Gloo, and one process.
"""

import sys

import side_by_side
from jobs import Job
from side_by_side import tables

__all__ = ["JOBS", "tables"]

JOBS = [Job(library, strategy, 2) for strategy in ("fsdp", "ddp") for library in ("torch", "fsdpx-module")]


def main() -> int:
    return side_by_side.compare(__doc__, "modules", JOBS, models=("small",))


if __name__ == "__main__":
    sys.exit(main())
