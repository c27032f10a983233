"""AdamW with its two moments in 8 bits (Dettmers et al. 2022)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fsdpx.array.sums import GRAIN
from fsdpx.errors import ConfigError
from fsdpx.optim import kernels
from fsdpx.optim.kept import Kept, check_edges, places
from fsdpx.optim.optimizer import Rate, Slots, check_options, check_shard
from fsdpx.optim.segments import Groups, Segments

__all__ = ["AdamW8bit"]


@dataclass(frozen=True)
class AdamW8bit:
    """`AdamW` whose m and v are kept in 8 bits between steps, in blocks with a scale each (Dettmers et al. 2022).

    A step widens a block, updates it as AdamW does, and rounds the new moments to the nearest dynamic number times the
    largest of their block. Only this differs from the paper: a v above 0 is never rounded to 0, which m could be
    divided by. Blocks are counted from the first element of each parameter, and shards are cut between blocks (at
    multiples of 1,024), so the bits do not depend on the cut. The tensor axis must have one rank.

    Slots: m, v, of 1 byte an element; m_scale, v_scale, of 4 bytes a block.

    Parameters
    ----------
    lr, betas, eps, weight_decay, groups : as in `AdamW`
    block : elements with one scale, a divisor of 1,024 from 16 on
    """

    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    block: int = 256
    groups: Groups = field(default_factory=dict)
    slots: ClassVar[tuple[str, ...]] = ("m", "v", "m_scale", "v_scale")
    whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self)
        if type(self.block) is not int or self.block < 16 or GRAIN % self.block:
            raise ConfigError(f"AdamW8bit(block={self.block!r}): 16, 32, 64, ..., or {GRAIN} elements are needed")

    @property
    def kept(self) -> Mapping[str, Kept]:
        scale = Kept("float32", block=self.block)
        return {"m": Kept("uint8"), "v": Kept("uint8"), "m_scale": scale, "v_scale": scale}

    def update(
        self, xp: Any, p: Any, g: Any, slots: Slots, *, lr: float, step: int, segments: Segments, scale: float = 1.0
    ) -> None:
        """One step in place, see `Optimizer.update`. ConfigError if the shard cuts a block."""
        check_shard(self, p, g, slots, step, segments)
        check_edges(self, segments, self.block)
        numbers = {"beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps, "scale": scale}
        scales = places(self.kept["m_scale"], segments)
        for s, run, at in zip(segments.items, segments.overrides(self.groups), scales, strict=True):
            own = slice(s.start, s.stop)
            moments = slots["m"][own], slots["v"][own], slots["m_scale"][at], slots["v_scale"][at]
            rates = {"lr": lr * run.lr_scale, "weight_decay": run.decay(self.weight_decay), **numbers}
            kernels.adam8(xp, p[own], g[own], *moments, block=self.block, step=step, **rates)
