"""Read properties of the processor from Linux."""

import functools
from pathlib import Path

__all__ = ["read_cpuinfo_field"]


@functools.cache
def read_cpuinfo_field(field: str) -> str:
    """Return the value of `field`, such as "flags" or "model name", of the first core in /proc/cpuinfo. Return "" if
    the field or the file does not exist."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.strip() == field), "")
