"""The check that names the rank and action that first saw NaN or Inf."""

from typing import Any

from fsdpx.errors import NumericsError
from fsdpx.program import Action
from fsdpx.state.placement import Placement

__all__ = ["demand_finite"]


def demand_finite(placement: Placement, array: Any, what: str, action: Action | None = None) -> None:
    """NumericsError naming rank, tensor, action and the first bad element, if there is one."""
    xp = placement.xp
    if placement.imaginary or array.dtype.kind not in "fV" or bool(xp.isfinite(array).all()):
        return
    bad = xp.asarray(~xp.isfinite(array)).reshape(-1)
    first = int(xp.argmax(bad))
    value = float(array.reshape(-1)[first])
    where = f" in action {action}" if action is not None else ""
    raise NumericsError(
        f"rank {placement.axes.world.rank}: {what} has {int(bad.sum())} of {bad.size} elements NaN or Inf{where}, "
        f"the first is {value} at flat index {first}"
    )
