"""Constants of a machine from measured steps: a few numbers of its file, so that predicted steps take as long."""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import numpy as np

from fsdpx import nn
from fsdpx.comm.mesh import Mesh
from fsdpx.errors import ConfigError
from fsdpx.files import read, unreadable
from fsdpx.plan.machine import Machine
from fsdpx.plan.prediction import Dry, prepared, whole

__all__ = ["FITTED", "MeasuredStep", "errors", "fit_report", "fitted", "rows_of"]

FITTED = {
    "efficiency": 0.02, "half": 1.0, "memory_efficiency": 0.05, "launch": 1.0, "spill": 1.0, "overhead": 2.0,
}  # fmt: skip
"""The numbers of computing that are fitted, and how far they may be from those of the machine's file: a standard
deviation of their logarithm. Steps of one size say little about others, and steps of one host about its links, so what
is known beforehand counts as well."""
NOISE = 0.08
"""Standard deviation of the logarithm of a measured step from a predicted one."""
ROUNDS = 12
"""Steps towards the most likely numbers at most."""
COLUMNS = ("gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq", "tensor", "data", "pipe")
SHARES = ("efficiency", "memory_efficiency", "spill")


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step of a GPT. numbers: by column of the file. seconds: measured."""

    numbers: Mapping[str, int]
    seconds: float

    def options(self, vocab: int = 51200) -> dict[str, Any]:
        """What `predict` takes: as Megatron trains, with all layers recomputed."""
        n = self.numbers
        x = ((n["global_batch"], n["seq"]), "int64")
        return {
            "model": nn.GPT(vocab, n["hidden"], n["layers"], n["heads"], max(n["seq"], 2048)),
            "batch": (x, x),
            "ranks": n["gpus"],
            "mesh": Mesh(replica=n["data"], pipe=n["pipe"], tensor=n["tensor"]),
            "microbatches": n["global_batch"] // n["data"] // n["micro_batch"],
            "recompute": "all",
            "precision": "fp16",
        }

    def dry(self) -> Dry:
        """Dry runs of this step on GPUs."""
        return prepared(gpu=True, **self.options())


def rows_of(path: str | PathLike[str]) -> list[MeasuredStep]:
    """The rows of a CSV file with columns gpus, global_batch, micro_batch, hidden, heads, layers, seq, tensor, data,
    pipe and step_ms; lines that begin with # are left out. ConfigError where it is none."""
    try:
        text = read(path, ours=False).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"measured steps {path} cannot be read: {unreadable(error, path)}") from error
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = []
    for at, line in enumerate(csv.DictReader(io.StringIO("\n".join(lines))), 1):
        try:
            found.append(MeasuredStep({name: int(line[name]) for name in COLUMNS}, float(line["step_ms"]) / 1e3))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"measured steps {path}, row {at}: {', '.join(COLUMNS)} and step_ms, not {line}"
            ) from error
    return found


def errors(machine: Machine, dries: Iterable[Dry], seconds: Iterable[float]) -> np.ndarray:
    """predicted / measured - 1 of each step."""
    return np.array([dry.on(machine).seconds / one - 1 for dry, one in zip(dries, seconds, strict=True)])


def fitted(
    machine: Machine, dries: Sequence[Dry], seconds: Sequence[float], names: Mapping[str, float] = FITTED
) -> Machine:
    """The machine with the most likely numbers of these names, when the logarithm of predicted / measured has the
    standard deviation `NOISE`, and that of each number the one in `names`.

    Gauss-Newton on logarithms, damped as by Levenberg and Marquardt; derivatives are differences. Nothing is drawn by
    chance."""
    first = np.log([max(getattr(machine.compute, name), 1e-12) for name in names])
    widths, damping = np.array(list(names.values())), 1e-2

    def made(values: np.ndarray) -> Machine:
        found = zip(names, np.exp(values), strict=True)
        numbers: dict[str, Any] = {name: float(min(value, 1.0) if name in SHARES else value) for name, value in found}
        return replace(machine, compute=replace(machine.compute, **numbers))

    def off(values: np.ndarray) -> np.ndarray:
        return np.concatenate([np.log1p(errors(made(values), dries, seconds)) / NOISE, (values - first) / widths])

    values, now = first, off(first)
    for _ in range(ROUNDS):
        slopes = np.stack([(off(values + step) - now) / 0.02 for step in 0.02 * np.eye(len(names))], axis=1)
        curve, down = slopes.T @ slopes, -slopes.T @ now
        gain = 0.0
        while gain <= 0 and damping < 1e6:
            step = np.linalg.solve(curve + damping * np.diag(np.diag(curve)), down)
            then = off(values + step)
            gain, damping = now @ now - then @ then, damping * 4
        if gain <= 1e-3 * (now @ now):
            break
        values, now, damping = values + step, then, damping / 64
    return made(values)


def fit_report(path: str | PathLike[str], name: str | PathLike[str], seed: int, rows: int) -> str:
    """The numbers that fit a random half of measured steps, and how far predictions are from the other half.

    Parameters
    ----------
    path : of the measured steps, see `rows_of`
    name : the machine where fitting begins
    seed : of the half
    rows : of that half, how many are used
    """
    steps, rows = rows_of(path), whole("rows", rows)
    if len(steps) < 2:
        raise ConfigError(f"measured steps {path}: one half is fitted, the other compared: two are needed at least")
    random.Random(seed).shuffle(steps)
    half = len(steps) // 2
    used = steps[: min(rows, half)]
    machine = fitted(Machine.load(name), [one.dry() for one in used], [one.seconds for one in used])
    measured = np.array([one.seconds for one in steps])
    off = errors(machine, (one.dry() for one in steps), measured)
    predicted = (off + 1) * measured
    groups: dict[tuple[int, ...], list[tuple[float, float]]] = {}
    for p, one in zip(predicted, steps, strict=True):
        key = tuple(one.numbers[word] for word in ("gpus", "global_batch", "hidden", "layers", "seq"))
        groups.setdefault(key, []).append((p, one.seconds))
    costs = [min(pairs)[1] / min(seconds for _, seconds in pairs) - 1 for pairs in groups.values() if len(pairs) > 1]
    numbers = ", ".join(f"{word} {getattr(machine.compute, word):.4g}" for word in FITTED)
    lines = [f"fitted to {len(used)} of {len(steps)} steps, seed {seed}: {numbers}"]
    for words, part in (("the half that was fitted", off[:half]), ("the other half", off[half:])):
        size = np.abs(part)
        lines.append(f"{words}: mean error {size.mean():.1%}, 90th percentile {np.percentile(size, 90):.1%}")
    first, second = (np.argsort(np.argsort(v)) for v in (predicted, measured))
    lines.append(f"Spearman's rank correlation of all steps: {np.corrcoef(first, second)[0, 1]:.3f}")
    if costs:
        lines.append(
            f"the configuration that is predicted to be the quickest of its group costs {np.mean(costs):.1%} more than "
            f"the quickest measured, in the mean of {len(costs)} groups; {max(costs):.1%} at worst"
        )
    return "\n".join(lines)
