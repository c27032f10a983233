"""Which form of a codec's kernels runs: plain array code, or Numba code of the same bits."""

from typing import Any

import numpy as np

from fsdpx.array.kernels import choice

__all__ = ["compiles"]


def compiles(xp: Any) -> bool:
    """Whether Numba code may run on arrays of `xp`."""
    return xp is np and choice.active != "plain" and choice.installed()
