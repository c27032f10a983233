"""LAMB: takes Adam's direction, and scales it for each parameter by the norm of the parameter (You et al. 2020,
Algorithm 2)."""

from typing import Any, ClassVar

import numpy as np

from fsdpx.core.array.sums import EXPANSION_PARTS, sum_block_squares
from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.base.name_hints import wrap_constructor_with_option_check
from fsdpx.optim.optimizer import (
    BLOCK_ELEMENTS,
    LearningRate,
    Slots,
    declare_update_formula,
    lerp_,
    lerp_square_,
    require_matching_shard,
    require_number_in_range,
    require_valid_betas,
    require_valid_hyperparameters,
)
from fsdpx.optim.segments import ParamGroups, ShardSegment, ShardSegments

__all__ = ["LAMB", "compute_direction", "step_along_direction", "update_moments"]


@declare_update_formula
def update_moments(xp, a, b, m, v, g, scale, share1, beta2, share2):
    xp.multiply(g, scale, out=a)
    lerp_(xp, m, a, b, share1)
    lerp_square_(xp, v, a, b, beta2, share2)


@update_moments.register_loop
def _update_moments_loop(m, v, g, scale, share1, beta2, share2):
    for i in range(m.size):
        a = g[i] * scale
        m[i] = m[i] + (a - m[i]) * share1
        v[i] = v[i] * beta2 + (a * a) * share2


def _write_direction(xp, u, b, p, m, v, unbias1, unbias2, eps, decay):
    xp.sqrt(v, out=b)
    b *= unbias2
    b += eps
    xp.multiply(m, unbias1, out=u)
    u /= b
    if decay != 0:
        xp.multiply(p, decay, out=b)
        u += b


@declare_update_formula
def compute_direction(xp, a, b, u, p, m, v, unbias1, unbias2, eps, decay):
    _write_direction(xp, u, b, p, m, v, unbias1, unbias2, eps, decay)


@compute_direction.register_loop
def _compute_direction_loop(u, p, m, v, unbias1, unbias2, eps, decay):
    for i in range(u.size):
        a = (m[i] * unbias1) / (np.sqrt(v[i]) * unbias2 + eps)
        if decay != 0:
            a = a + p[i] * decay
        u[i] = a


@declare_update_formula
def step_along_direction(xp, a, b, p, m, v, unbias1, unbias2, eps, decay, rate):
    _write_direction(xp, a, b, p, m, v, unbias1, unbias2, eps, decay)
    a *= rate
    p -= a


@step_along_direction.register_loop
def _step_along_direction_loop(p, m, v, unbias1, unbias2, eps, decay, rate):
    for i in range(p.size):
        a = (m[i] * unbias1) / (np.sqrt(v[i]) * unbias2 + eps)
        if decay != 0:
            a = a + p[i] * decay
        p[i] = p[i] - a * rate


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class LAMB:
    """LAMB (You et al. 2020): Adam's direction u, scaled for each parameter by the ratio of the parameter norm to the
    direction norm.

    `u = m / (sqrt(v) + eps) + weight_decay * p`, then `p -= lr * |p| / |u| * u`, with norms over the full parameter.

    m and v are bias-corrected. The ratio |p| / |u| is taken as 1 if one of the norms is 0. Squares are summed in
    float64 over blocks of 1024 elements, and the sums of the blocks are added exactly. If shard boundaries coincide
    with block boundaries, the results are therefore bit-identical to those for an unsharded parameter. Otherwise, they
    differ only by rounding. Slots (state arrays): m, v. Each update of a page (flat parameter buffer) all-gathers
    `gathers` numbers per parameter.

    Parameters
    ----------
    lr : a number, or a schedule: a function that takes the step, counted from 1, and returns a number
    betas : decay of m and of v per step, each in [0, 1)
    eps : number that is added to the square root
    weight_decay : coefficient; weight_decay * p is added to u
    groups : dict that maps name patterns (fnmatch) to dicts with `weight_decay`, `lr_scale` or both, for the matching
        parameters
    """

    lr: LearningRate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    groups: ParamGroups = field(default_factory=dict)
    slots = ("m", "v")
    gathers: ClassVar[int] = 2 * EXPANSION_PARTS

    def __post_init__(self) -> None:
        require_valid_hyperparameters(self)
        require_valid_betas(self, self.betas)
        require_number_in_range(self, "eps", self.eps)

    def update(
        self,
        xp: Any,
        p: Any,
        g: Any,
        slots: Slots,
        *,
        lr: float,
        step: int,
        segments: ShardSegments,
        scale: float = 1.0,
    ) -> None:
        require_matching_shard(self, p, g, slots, step, segments)
        m, v, (beta1, beta2) = slots["m"], slots["v"], self.betas
        update_moments(xp, (m, v, g), (scale, 1.0 - beta1, beta2, 1.0 - beta2))
        runs = segments.hyperparameters_per_segment(self.groups)
        options = [
            (*self._get_bias_corrections(step - run.missed), self.eps, run.get_weight_decay(self.weight_decay))
            for run in runs
        ]
        squares = [
            _sum_parameter_and_direction_squares(xp, s, p, m, v, numbers)
            for s, numbers in zip(segments.items, options, strict=True)
        ]
        norms = segments.all_reduce_square_sums([of_p for of_p, _ in squares], [of_u for _, of_u in squares])
        for run, numbers, of_p, of_u in zip(runs, options, *norms, strict=True):
            span = slice(run.start, run.stop)
            ratio = (of_p / of_u) ** 0.5 if of_p > 0 and of_u > 0 else 1.0
            step_along_direction(xp, (p[span], m[span], v[span]), (*numbers, lr * run.lr_scale * ratio))

    def _get_bias_corrections(self, count: int) -> tuple[float, float]:
        """Return the bias-correction factors for m and for sqrt(v) after `count` updates."""
        beta1, beta2 = self.betas
        return 1.0 / (1.0 - beta1**count), (1.0 - beta2**count) ** -0.5


def _sum_parameter_and_direction_squares(
    xp: Any, segment: ShardSegment, p: Any, m: Any, v: Any, numbers: tuple[float, ...]
) -> tuple[list[float], list[float]]:
    """For a segment (the part of a parameter in this shard), return two lists of partial sums of squares: one for the
    parameters in the segment, and one for their update direction. `numbers` are the scalars in the formula of the
    direction, such as eps."""
    of_p, of_u = [], []
    scratch = xp.empty(min(BLOCK_ELEMENTS, segment.stop - segment.start), p.dtype)
    for start in range(segment.start, segment.stop, BLOCK_ELEMENTS):
        block = slice(start, min(start + BLOCK_ELEMENTS, segment.stop))
        u = scratch[: block.stop - block.start]
        compute_direction(xp, (u, p[block], m[block], v[block]), numbers)
        of_p += sum_block_squares(xp, p[block])
        of_u += sum_block_squares(xp, u)
    return of_p, of_u
