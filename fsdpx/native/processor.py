"""What Linux says of the processor."""

from pathlib import Path

__all__ = ["told"]


def told(field: str) -> str:
    """What /proc/cpuinfo says in `field` of the first core, such as "flags" or "model name"; "" where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    said = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in said if name.strip() == field), "")
