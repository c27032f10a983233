"""How fast is training without MPI, over Gloo, beside MPI and beside PyTorch over Gloo?

    python bench/gloo.py [--models tiny small mlp many cnn] [--rounds 6] [--seconds 1] [--quick]

Measured as in `side_by_side.py`. "fsdpx-gloo" is started by `fsdpx run --backend gloo`, and takes turns with MPI.
"""

import sys
from typing import Any

import side_by_side
from jobs import Job
from records import lines

__all__ = ["JOBS", "tables"]

JOBS = [Job(library, strategy, 2) for strategy in ("fsdp", "ddp") for library in ("torch", "fsdpx", "fsdpx-gloo")]


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [*side_by_side.tables(found), ("beside PyTorch", beside_torch(found))]


def beside_torch(found: dict[str, Any]) -> str:
    """Rates of all three: those of the duel with MPI, else of jobs by themselves."""
    rates = {(row["model"], row["job"]): row["rate"] for row in found["rows"] if "rate" in row}
    made = []
    for model in dict.fromkeys(row["model"] for row in found["rows"]):
        for strategy in ("fsdp", "ddp"):
            each = [rates.get((model, f"{library} {strategy} 2x1")) for library in ("torch", "fsdpx", "fsdpx-gloo")]
            if None not in each:
                torch, mpi, gloo = each
                made.append(
                    [model, strategy, *(f"{rate:,.1f}" for rate in each), f"{mpi / torch:.2f}", f"{gloo / torch:.2f}"]
                )
    return lines(["model", "", "torch", "MPI", "Gloo", "MPI/torch", "Gloo/torch"], made, left=2)


def main() -> int:
    return side_by_side.compare(__doc__, "gloo", JOBS, beside_torch)


if __name__ == "__main__":
    sys.exit(main())
