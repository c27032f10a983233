"""LAMB: Adam's direction, scaled per parameter to the parameter's own norm (You et al. 2020, Algorithm 2)."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fsdpx.core.array.sums import PARTS, block_squares
from fsdpx.core.base.name_hints import knowing
from fsdpx.optim.optimizer import (
    BLOCK,
    Rate,
    Slots,
    check_betas,
    check_number,
    check_options,
    check_shard,
    square_toward,
    toward,
    update,
)
from fsdpx.optim.segments import Groups, Segment, Segments

__all__ = ["LAMB", "direction", "follow", "moments"]


@update
def moments(xp, a, b, m, v, g, scale, share1, beta2, share2):
    xp.multiply(g, scale, out=a)
    toward(xp, m, a, b, share1)
    square_toward(xp, v, a, b, beta2, share2)


@moments.compiled
def _moments_loop(m, v, g, scale, share1, beta2, share2):
    for i in range(m.size):
        a = g[i] * scale
        m[i] = m[i] + (a - m[i]) * share1
        v[i] = v[i] * beta2 + (a * a) * share2


def _direction(xp, u, b, p, m, v, unbias1, unbias2, eps, decay):
    xp.sqrt(v, out=b)
    b *= unbias2
    b += eps
    xp.multiply(m, unbias1, out=u)
    u /= b
    if decay != 0:
        xp.multiply(p, decay, out=b)
        u += b


@update
def direction(xp, a, b, u, p, m, v, unbias1, unbias2, eps, decay):
    _direction(xp, u, b, p, m, v, unbias1, unbias2, eps, decay)


@direction.compiled
def _direction_loop(u, p, m, v, unbias1, unbias2, eps, decay):
    for i in range(u.size):
        a = (m[i] * unbias1) / (np.sqrt(v[i]) * unbias2 + eps)
        if decay != 0:
            a = a + p[i] * decay
        u[i] = a


@update
def follow(xp, a, b, p, m, v, unbias1, unbias2, eps, decay, rate):
    _direction(xp, a, b, p, m, v, unbias1, unbias2, eps, decay)
    a *= rate
    p -= a


@follow.compiled
def _follow_loop(p, m, v, unbias1, unbias2, eps, decay, rate):
    for i in range(p.size):
        a = (m[i] * unbias1) / (np.sqrt(v[i]) * unbias2 + eps)
        if decay != 0:
            a = a + p[i] * decay
        p[i] = p[i] - a * rate


@knowing
@dataclass(frozen=True)
class LAMB:
    """u = m / (sqrt(v) + eps) + weight_decay p; p -= lr (|p| / |u|) u, with norms over the full parameter.

    m, v are bias-corrected; the ratio is 1 where one of the norms is 0. Norms are added in float64 over blocks of 1024
    elements and then exactly: shards cut at block edges give the same bits as the full array, others the same to
    rounding. Slots: m, v. One all-gather of `gathers` numbers per parameter for each update of a page.

    Parameters
    ----------
    lr : a number, or a schedule from 1-based step to number
    betas : decay of the two means per step, each in [0, 1)
    eps : added to the square root
    weight_decay : times p, is added to u
    groups : name pattern (fnmatch) -> {"weight_decay", "lr_scale"} for the parameters that match
    """

    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    groups: Groups = field(default_factory=dict)
    slots: ClassVar[tuple[str, ...]] = ("m", "v")
    gathers: ClassVar[int] = 2 * PARTS

    def __post_init__(self) -> None:
        check_options(self)
        check_betas(self, self.betas)
        check_number(self, "eps", self.eps)

    def update(
        self, xp: Any, p: Any, g: Any, slots: Slots, *, lr: float, step: int, segments: Segments, scale: float = 1.0
    ) -> None:
        check_shard(self, p, g, slots, step, segments)
        m, v, (beta1, beta2) = slots["m"], slots["v"], self.betas
        moments(xp, (m, v, g), (scale, 1.0 - beta1, beta2, 1.0 - beta2))
        runs = segments.overrides(self.groups)
        options = [(*self._unbias(step - run.missed), self.eps, run.decay(self.weight_decay)) for run in runs]
        squares = [_squares(xp, s, p, m, v, numbers) for s, numbers in zip(segments.items, options, strict=True)]
        norms = segments.square_sums([of_p for of_p, _ in squares], [of_u for _, of_u in squares])
        for run, numbers, of_p, of_u in zip(runs, options, *norms, strict=True):
            at = slice(run.start, run.stop)
            ratio = (of_p / of_u) ** 0.5 if of_p > 0 and of_u > 0 else 1.0
            follow(xp, (p[at], m[at], v[at]), (*numbers, lr * run.lr_scale * ratio))

    def _unbias(self, count: int) -> tuple[float, float]:
        """Factors on m and on the root of v after so many updates."""
        beta1, beta2 = self.betas
        return 1.0 / (1.0 - beta1**count), (1.0 - beta2**count) ** -0.5


def _squares(
    xp: Any, segment: Segment, p: Any, m: Any, v: Any, numbers: tuple[float, ...]
) -> tuple[list[float], list[float]]:
    """Partial sums of squares of a segment's parameter and of its direction."""
    of_p, of_u = [], []
    scratch = xp.empty(min(BLOCK, segment.stop - segment.start), p.dtype)
    for start in range(segment.start, segment.stop, BLOCK):
        at = slice(start, min(start + BLOCK, segment.stop))
        u = scratch[: at.stop - at.start]
        direction(xp, (u, p[at], m[at], v[at]), numbers)
        of_p += block_squares(xp, p[at])
        of_u += block_squares(xp, u)
    return of_p, of_u
