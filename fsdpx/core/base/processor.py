"""What Linux says of the processor."""

import functools
from pathlib import Path

__all__ = ["read_cpuinfo"]


@functools.cache
def read_cpuinfo(field: str) -> str:
    """What /proc/cpuinfo says in `field` of the first core, such as "flags" or "model name"; "" where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.strip() == field), "")
