"""Pure bfloat16 training: parameters and optimizer state are stored in bfloat16, and updated in float32."""

from typing import Any

from fsdpx.core.array.kernels.half import add_widened, cast_float_to_dtype, round_randomly, store
from fsdpx.core.array.random import NumberRange
from fsdpx.core.base.dataclass import dataclass
from fsdpx.optim.optimizer import (
    Elementwise,
    Optimizer,
    SlotFormat,
    Slots,
    WrappedOptimizer,
    require_matching_shard,
    unwrap_optimizer,
    update_parameters,
)
from fsdpx.optim.segments import ShardSegments

__all__ = ["RoundedOptimizer"]

BLOCK_ELEMENTS = 1 << 16
"""Number of elements that are updated at a time. The number is small enough that the float32 copies of the elements
stay in the cache."""


@dataclass(frozen=True)
class RoundedOptimizer(WrappedOptimizer):
    """Wraps an optimizer so that parameters and state are stored in bfloat16, and converted to float32 for each
    update.

    Most updates are smaller than half of a parameter's last bit, so rounding to the nearest bfloat16 would discard
    them. Stochastic rounding avoids this loss because it is unbiased (Gupta et al. 2015). The random numbers depend on
    parameter, element and step, so results are bit-identical for any sharding of the parameters. With `kahan` (Kahan's
    summation, 1965), the additional optimizer state "lost" keeps the rounding error of each parameter, and only
    `inner`'s state is rounded stochastically.

    Parameters
    ----------
    inner : optimizer that computes the update
    kahan : whether to keep the rounding error of the parameters
    """

    inner: Optimizer
    kahan: bool = False

    @property
    def slots(self) -> tuple[str, ...]:
        return (*self.inner.slots, "lost") if self.kahan else tuple(self.inner.slots)

    def update(
        self, xp: Any, p: Any, g: Any, slots: Slots, *, lr: float, step: int, segments: ShardSegments,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Update a shard in place, like `Optimizer.update`. `p` and `slots` are bfloat16, and `g` is float32."""
        require_matching_shard(self, p, g, slots, step, segments)
        if not isinstance(unwrap_optimizer(self), Elementwise):
            self._update_block(xp, p, g, slots, segments, lr=lr, step=step, scale=scale)
            return
        for start, part in segments.split_into_blocks(BLOCK_ELEMENTS):
            at = slice(start, start + part.size)
            mine = {name: array[at] for name, array in slots.items()}
            self._update_block(xp, p[at], g[at], mine, part, lr=lr, step=step, scale=scale)

    def _update_block(
        self, xp: Any, p: Any, g: Any, slots: Slots, part: ShardSegments, *, step: int, **rates: Any
    ) -> None:
        x = cast_float_to_dtype(xp, p, g.dtype)
        if self.kahan:
            add_widened(xp, slots["lost"], x)
        narrow = [name for name, kept in self.slot_formats.items() if kept == SlotFormat()]
        wide = {name: cast_float_to_dtype(xp, slots[name], g.dtype) for name in narrow}
        own = {name: slots[name] for name in self.inner.slots}
        update_parameters(self.inner, xp, x, g, own | wide, step=step, segments=part, **rates)
        for name, array in wide.items():
            _round_block_stochastically_into(xp, array, slots[name], f"{name}@{step}", part)
        if self.kahan:
            store(xp, x, p)
            x -= cast_float_to_dtype(xp, p, x.dtype)
            store(xp, x, slots["lost"])
        else:
            _round_block_stochastically_into(xp, x, p, f"@{step}", part)


def _round_block_stochastically_into(xp: Any, x: Any, out: Any, what: str, part: ShardSegments) -> None:
    for s in part.items:
        numbers = NumberRange(0, f"{s.name}/{what}", s.offset, s.offset + s.stop - s.start)
        round_randomly(xp, x[s.start : s.stop], out[s.start : s.stop], numbers)
