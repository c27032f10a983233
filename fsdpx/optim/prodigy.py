"""Prodigy: Adam that finds its learning rate (Mishchenko & Defazio 2023)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar

import numpy as np

from fsdpx.array.sums import GRAIN
from fsdpx.errors import ConfigError
from fsdpx.optim import kernels
from fsdpx.optim.kept import Kept, places
from fsdpx.optim.optimizer import Rate, Slots, check_number, check_options, has_data
from fsdpx.optim.segments import Groups, Segments

__all__ = ["Prodigy"]

Gauge = tuple[float, float, float]
CHUNK = 64 * GRAIN


@dataclass(frozen=True)
class Prodigy:
    """Adam on d g, with steps of lr d, for an estimate d of how far the parameters are from the solution: the largest
    so far of d_coef r / |s|_1, with r = mean of lr d^2 <g, x0 - p> and s = mean of lr d^2 g, both with a decay of
    sqrt(betas[1]) (Mishchenko & Defazio 2023, Algorithm 4). x0: the parameters before step 1.

    r and |s|_1 are sums over all parameters of all ranks: the verb GAUGE adds them before each update, in one message.

    Slots: m, v, s, away = x0 - p; and gauge, of which each parameter has the same: updates so far, d, and r.

    Parameters
    ----------
    lr : a number, or a schedule from 1-based step to number: 1, with a decay to 0 where the training has an end
    betas : decay of the two means per step, each in [0, 1)
    eps : added, times d, to the square root
    weight_decay : share of p that is taken off per step, times lr d
    d0 : the first d, above 0: a distance that is surely too small
    d_coef : factor of the estimates, above 0
    growth_rate : factor by which d rises in a step at most, above 1; 1.02 is like a warm-up
    safeguard_warmup : leave lr out of s, though not out of r, so that the short steps of a warm-up are not taken for a
        solution that is far away; for schedules that begin low
    groups : name pattern (fnmatch) -> {"weight_decay", "lr_scale"} for the parameters that match
    """

    lr: Rate = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    d0: float = 1e-6
    d_coef: float = 1.0
    growth_rate: float = inf
    safeguard_warmup: bool = False
    groups: Groups = field(default_factory=dict)
    slots: ClassVar[tuple[str, ...]] = ("m", "v", "s", "away", "gauge")
    kept: ClassVar[Mapping[str, Kept]] = {"gauge": Kept("float64", shape=lambda name, shape: (3,))}
    gauged: ClassVar[tuple[str, ...]] = ("away", "s")

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("d0", "d_coef"):
            check_number(self, name, getattr(self, name))
            if not getattr(self, name):
                raise ConfigError(f"Prodigy({name}={getattr(self, name)!r}): a number above 0 is needed")
        if not isinstance(self.growth_rate, int | float) or not self.growth_rate > 1:
            raise ConfigError(f"Prodigy(growth_rate={self.growth_rate!r}): a number above 1 is needed")
        if not isinstance(self.safeguard_warmup, bool):
            raise ConfigError(f"Prodigy(safeguard_warmup={self.safeguard_warmup!r}): choose True or False")

    def terms(self, xp: Any, g: Any, slots: Slots) -> tuple[list[float], list[float]]:
        """Of a stretch of elements: sums of g (x0 - p) and of |s|, over fixed blocks."""
        away, s = slots["away"], slots["s"]
        dots, sizes = list[float](), list[float]()
        for start in range(0, g.size, CHUNK):
            at = slice(start, start + CHUNK)
            dots += _blocks(g[at].astype(np.float64) * away[at].astype(np.float64))
            sizes += _blocks(abs(s[at]).astype(np.float64))
        return dots, sizes

    def gauge(self, kept: Gauge, dot: float, size: float, lr: float) -> Gauge:
        """What is kept after the next update, of which d is that of the update. kept: what is kept now. dot:
        <g, x0 - p> of this step. size: |s|_1 before it."""
        count, d, r = kept
        before, found = max(d, self.d0), self.d_coef * r / size if size > 0 else 0.0
        d = max(before, min(found, before * self.growth_rate))
        decay = self.betas[1] ** 0.5
        return count + 1.0, d, decay * r + (1.0 - decay) * lr * d**2 * dot

    def update(
        self, xp: Any, p: Any, g: Any, slots: Slots, *, lr: float, step: int, segments: Segments, scale: float = 1.0,
        gauge: Gauge | None = None,
    ) -> None:  # fmt: skip
        """One step in place, see `Optimizer.update`. gauge: what `gauge` gave; without, d stays as it is."""
        if not has_data(self, xp, p, g, slots, step, segments):
            return
        d = self.d0 if gauge is None else gauge[1]
        for run in segments.runs(self.groups):
            at, rate = slice(run.start, run.stop), lr * run.lr_scale
            arrays = (p[at], g[at], *(slots[name][at] for name in ("m", "v", "s", "away")))
            numbers = {"d": d, "lr": rate, "beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps}
            weight = 1.0 if self.safeguard_warmup else rate
            kernels.prodigy(
                xp, *arrays, weight=weight, weight_decay=run.decay(self.weight_decay), scale=scale, **numbers
            )
        for at in places(self.kept["gauge"], segments):
            slots["gauge"][at] = xp.asarray(gauge or (0.0, d, 0.0))


def _blocks(x: Any) -> list[float]:
    """Sums over blocks of GRAIN elements, the last one perhaps shorter."""
    full = x.size // GRAIN * GRAIN
    sums: list[float] = x[:full].reshape(-1, GRAIN).sum(axis=1).tolist()
    return sums + ([float(x[full:].sum())] if full < x.size else [])
