"""How fast and how large is training in bf16 beside PyTorch's autocast and FSDP2's policy, and beside our float32?

    python bench/halves.py [--models tiny small mlp many cnn] [--rounds 6] [--seconds 1] [--quick]

Measured as in `side_by_side.py`. "-sums" reduces gradients in bf16 as well.
"""

import sys
from typing import Any

import side_by_side
from jobs import Job
from records import lines

__all__ = ["JOBS", "tables"]

JOBS = [
    Job("torch-bf16", "single", 1),
    Job("fsdpx-bf16", "ddp", 1),
    Job("fsdpx", "ddp", 1),
    Job("torch-bf16", "ddp", 2),
    Job("fsdpx-bf16", "ddp", 2),
    Job("torch-bf16", "fsdp", 2),
    Job("fsdpx-bf16", "fsdp", 2),
    Job("torch-bf16-sums", "fsdp", 2),
    Job("fsdpx-bf16-sums", "fsdp", 2),
]


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [*side_by_side.tables(found), ("beside float32", beside_float32(found))]


def beside_float32(found: dict[str, Any]) -> str:
    """Rates on one thread: both jobs by themselves, or in turns with PyTorch's."""
    rates = {(row["model"], row["job"]): row["rate"] for row in found["rows"] if "rate" in row}
    made = []
    for model in dict.fromkeys(row["model"] for row in found["rows"]):
        half, single = (rates.get((model, f"{library} ddp 1x1")) for library in ("fsdpx-bf16", "fsdpx"))
        if half and single:
            made.append([model, f"{single:,.1f}", f"{half:,.1f}", f"{half / single:.2f}"])
    return lines(["model", "float32", "bf16", "ratio"], made)


def main() -> int:
    return side_by_side.compare(__doc__, "halves", JOBS, beside_float32)


if __name__ == "__main__":
    sys.exit(main())
