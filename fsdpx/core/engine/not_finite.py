"""Find the first element of an array that is NaN or Inf, for error messages."""

from __future__ import annotations

from typing import Any

from fsdpx.core.program import Action
from fsdpx.core.state.placement import Placement
from fsdpx.errors import NumericsError

__all__ = ["describe_not_finite", "require_finite"]


def require_finite(placement: Placement, array: Any, what: str, action: Action | None = None) -> None:
    """Raise NumericsError if an element is NaN or Inf. The error names the rank, the array (`what`), the action and
    the first such element."""
    if text := describe_not_finite(placement, array, what, f" in action {action}" if action is not None else ""):
        raise NumericsError(text)


def describe_not_finite(placement: Placement, array: Any, what: str, where: str = "") -> str:
    """Return a sentence that names the rank, the array (`what`) and its first NaN or Inf, or "" if all elements are
    finite. `where` is text to insert into the sentence, such as " in action F3.0"."""
    xp = placement.xp
    if array.dtype.kind not in "fV" or placement.device.is_finite(array):
        return ""
    bad = xp.asarray(~xp.isfinite(array)).reshape(-1)
    first = int(xp.argmax(bad))
    value = float(array.reshape(-1)[first])
    return (
        f"rank {placement.axes.world.rank}: {what} has {int(bad.sum())} of {bad.size} elements NaN or Inf{where}, "
        f"the first is {value} at flat index {first}"
    )
