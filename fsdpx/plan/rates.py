"""What a job does in a day and what it costs, with the failures of the machine and the checkpoints against them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import exp, expm1, inf, sqrt
from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.plan.machine import Machine
from fsdpx.plan.storage import Checkpoint

__all__ = ["JobRates", "interval", "rates", "useful"]

DAY, HOUR = 86400.0, 3600.0
STEPS = 1000
"""That costs are said of."""


def interval(save: float, mtbf: float) -> float:
    """Seconds of computing between two checkpoints that lose least time: Daly 2006, "A higher order estimate of the
    optimum checkpoint interval for restart dumps", equation 37; its first term is Young's of 1974, sqrt(2 save mtbf).

    save: seconds of a checkpoint. mtbf: mean seconds between failures of the job."""
    if save >= 2 * mtbf:
        return mtbf
    part = sqrt(save / (2 * mtbf))
    return sqrt(2 * save * mtbf) * (1 + part / 3 + part * part / 9) - save


def useful(between: float, save: float, restore: float, mtbf: float) -> float:
    """Share of time that goes into steps which are not lost: Daly 2006, equation 20, for failures that know no past.

    between: seconds of computing between two checkpoints. restore: seconds from a failure until steps go on."""
    each = (between + save) / mtbf
    return (between / mtbf / -expm1(-each) if each else 1.0) * exp(-restore / mtbf - each)


@dataclass(frozen=True)
class JobRates:
    """A job over days.

    Parameters
    ----------
    steps, samples : of a day that are done and not lost
    useful : share of the time that goes into them
    mtbf : mean seconds between failures of all its ranks; None if no failures are counted
    save, restore : seconds of a checkpoint, and from a failure until steps go on
    interval : seconds of computing between two checkpoints that lose least
    hours, unit : "GPU-hours" or "core-hours" of 1,000 such steps
    joules : of the same; None if the machine does not say watts
    checkpoint : what ranks write and read
    """

    steps: float
    samples: float
    useful: float
    mtbf: float | None
    save: float
    restore: float
    interval: float | None
    hours: float
    unit: str
    joules: float | None
    checkpoint: Checkpoint

    def __str__(self) -> str:
        lines = [f"a day: {self.steps:,.0f} steps, {self.samples:,.0f} samples"]
        if self.mtbf is not None and self.interval is not None:
            lines[0] += f"; {self.useful:.1%} of what it would be without failures and checkpoints"
            words = f"a checkpoint takes {self.save:,.3g} s and is best made after each {self.interval:,.0f} s"
            lines.append(f"a failure each {self.mtbf / HOUR:,.3g} h; {words}, going on takes {self.restore:,.3g} s")
        lines.append(str(self.checkpoint))
        energy = "" if self.joules is None else f", {self.joules / 1e6:,.4g} MJ"
        return "\n".join([*lines, f"{STEPS:,} steps cost {self.hours:,.4g} {self.unit}{energy}"])

    def as_json(self) -> dict[str, Any]:
        """For programs. None in place of hours and joules without end, of steps that failures never let end."""
        return {name: None if value == inf else value for name, value in asdict(self).items()}


def rates(
    machine: Machine, ranks: int, seconds: float, samples: int, checkpoint: Checkpoint, *, mtbf: float | None,
    save: float | None, restore: float | None,
) -> JobRates:  # fmt: skip
    """Of steps that take so many seconds; see `Prediction.rates`."""
    compute, disk = machine.compute, machine.disk
    for name, value in (("mtbf", mtbf), ("save", save), ("restore", restore)):
        good = isinstance(value, int | float) and 0 <= value < inf and (value or name != "mtbf")
        if value is not None and not good:
            raise ConfigError(f"{name}={value!r}: seconds are needed, a number above 0")
    one = compute.mtbf if mtbf is None else mtbf
    times = (None, None) if disk is None else checkpoint.seconds(disk)
    write, read = (given if given is not None else own for given, own in zip((save, restore), times, strict=True))
    share, between, every = 1.0, None, None if one is None else one / ranks
    if every is not None and write is not None:
        read = write if read is None else read
        between = interval(write, every)
        share = useful(between, write, read, every)
    elif mtbf is not None:
        raise ConfigError(
            f"mtbf={mtbf!r}: machine {machine.name!r} has no [disk], so say how long a checkpoint takes: save=60.0"
        )
    steps = DAY / seconds * share
    hours = ranks * DAY / HOUR * STEPS / steps if steps else inf
    joules = None if compute.watts is None else hours * HOUR * compute.watts
    unit, hours = ("GPU-hours", hours) if compute.gpu else ("core-hours", hours * compute.cores)
    known = every if between is not None else None
    return JobRates(
        steps, steps * samples, share, known, write or 0.0, read or 0.0, between, hours, unit, joules, checkpoint
    )
