"""Which choices exclude each other, why, and what to do: one table, of which errors and a page of the docs are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fsdpx import config
from fsdpx.config import Async
from fsdpx.errors import ConfigError
from fsdpx.nn.layer import Layer
from fsdpx.nn.sort import Sorted
from fsdpx.state.local import local_of

__all__ = [
    "CHUNKS", "ELASTIC", "LOCAL", "OWN", "STAGES", "TABLE", "Beside", "Excluded", "demand_together", "is_collective",
    "table",
]  # fmt: skip


@dataclass(frozen=True)
class Beside:
    """What was chosen, as far as it is known: what is looked at by a row of the table.

    Parameters
    ----------
    recipe : all choices of the user
    model : its layers in the order in which they run
    formats : number formats by role, a `Precision`
    mesh : with all widths
    state : names of running statistics
    xp : the namespace of arrays
    """

    recipe: Any
    model: Sorted | None = None
    formats: Any = None
    mesh: Any = None
    state: Iterable[str] = ()
    xp: Any = np

    @property
    def layer(self) -> Any:
        """The first node whose layer speaks with other ranks in each step, or None."""
        nodes = () if self.model is None else self.model.nodes
        return next((node for node in nodes if is_collective(node.layer)), None)

    def option(self, name: str) -> Any:
        """The choice of the user by this name."""
        parts = self.recipe.training, self.recipe.distribution, self.recipe.machinery
        return next(getattr(part, name) for part in parts if hasattr(part, name))


class Excluded(NamedTuple):
    """A choice that excludes another one.

    Parameters
    ----------
    choice, other : what excludes each other, in words
    found : the other as it was given, the beginning of the sentence of an error; "" where it was not chosen
    why, remedy : the reason, and what to do
    """

    choice: str
    other: str
    found: Callable[[Beside], str]
    why: str
    remedy: str


def _given(name: str, end: str = ": ") -> Callable[[Beside], str]:
    return lambda c: "" if c.option(name) is None else f"{name}={c.option(name)!r}{end}"


def _width(axis: str, text: str) -> Callable[[Beside], str]:
    def found(c: Beside) -> str:
        return text.format(width=c.mesh.width(axis), mesh=c.mesh) if c.mesh.width(axis) > 1 else ""

    return found


def _other_axis(c: Beside) -> str:
    axis = "replica" if isinstance(config.apart(c.option("strategy")), Async) else "shard"
    return f"there is no {axis} axis, the mesh says {c.mesh}" if c.mesh.width(axis) > 1 else ""


def _norm_of_sum(c: Beside) -> str:
    choice = config.apart(c.option("strategy"))
    return _given("clip_norm")(c) if isinstance(choice, Async) and choice.staleness == 0 else ""


def _format(name: str) -> Callable[[Beside], str]:
    def found(c: Beside) -> str:
        value = getattr(c.formats, name)
        return "" if value is None else f"{name}={value!r} "

    return found


def _when(text: str, true: Callable[[Beside], bool]) -> Callable[[Beside], str]:
    return lambda c: text if true(c) else ""


def _dynamic(c: Beside) -> bool:
    return c.formats is not None and c.formats.loss_scale == "dynamic"


def _layer(text: str) -> Callable[[Beside], str]:
    return lambda c: "" if c.layer is None else text.format(path=c.layer.path, layer=c.layer.layer)


LOCAL, OWN, ELASTIC = "local training", "ranks at their own speed", "elastic ranks"
CHUNKS, STAGES = "`chunks`", "`stages`"
TABLE: tuple[Excluded, ...] = (
    Excluded(LOCAL, "`chunks`", _given("chunks"), "its bits depend on the mesh", "leave chunks out"),
    Excluded(LOCAL, "a dynamic loss scale", _when("a dynamic loss scale: ", _dynamic),
        "replicas would skip different steps", "choose a fixed loss_scale, or precision='bf16'"),
    Excluded(LOCAL, "16-bit masters", _when("16-bit masters: ", lambda c: c.formats.master == "bf16"),
        "outer steps are smaller than their last bit", "precision='bf16'"),
    Excluded(LOCAL, "`average`", _given("average"), "outer parameters are a mean already", "leave average out"),
    Excluded(LOCAL, "`offload`", _when("offload: ", lambda c: c.option("offload") is not None),
        "what replicas exchange must be in memory", "leave offload out"),
    Excluded(LOCAL, "a layer that takes statistics over the global batch", _layer("layer {path!r}: "),
        "it speaks with all ranks in every step", "take one that does not, such as GroupNorm"),
    Excluded(OWN, "a `pipe` axis", _width("pipe", "the pipe axis of {width} ranks "), "keeps step", "leave it out"),
    Excluded(OWN, "a `tensor` axis", _width("tensor", "the tensor axis of {width} ranks "), "keeps step",
        "leave it out"),
    Excluded(OWN, "another data axis than its own", _other_axis, "", "leave mesh out"),
    Excluded(OWN, "`offload`", _when("offload: ", lambda c: c.option("offload") is not None),
        "what several ranks change does not lie on one rank's disk", "leave offload out"),
    Excluded(OWN, "`chunks`", _given("chunks", " "), "adds the gradients of all ranks along a tree",
        "leave chunks out"),
    Excluded(OWN, "`codec`", _given("codec", " "), "carries sums over ranks, and there are none", "leave codec out"),
    Excluded(OWN, "`clip_norm` with a staleness of 0", _norm_of_sum,
        "no rank knows the norm of the sum before it updates", "leave it out"),
    Excluded(OWN, "a layer that takes statistics over the global batch", _layer("layer {layer!r} "),
        "takes statistics over the global batch", "use LayerNorm or RMSNorm"),
    Excluded(OWN, "running statistics", lambda c: next((f"running statistics ({name}) " for name in c.state), ""),
        "would differ from rank to rank", "use LayerNorm or RMSNorm"),
    Excluded(OWN, "`device`", lambda c: "" if c.xp is np else f"device={c.option('device')!r}: ",
        "parameters lie in a window in host memory", "use device='cpu'"),
    Excluded(OWN, "a dynamic loss scale", _when("loss_scale='dynamic' ", _dynamic),
        "is found by all ranks together", "use a number, or precision='bf16'"),
    Excluded(OWN, "16-bit masters", _when("parameters that several ranks update ", lambda c:
        c.formats.updated == "bf16"), "are float32 or float64", "use precision='bf16'"),
    *(Excluded(OWN, f"`Precision({name}=)`", _format(name), "is a format of messages, and there are none",
        "leave it out") for name in ("param", "reduce")),
    Excluded(ELASTIC, "`backend`", lambda c:
        "" if c.option("backend") in (None, "mpi") else f"backend={c.option('backend')!r}: ",
        "elastic ranks exchange messages", "leave backend out"),
    Excluded(ELASTIC, "`offload`", _when("offload: ", lambda c: c.option("offload") is not None),
        "elastic ranks keep copies of each other's state in memory", "leave elastic out"),
    Excluded(ELASTIC, "`trace`", _when("trace: ", lambda c: c.option("trace") is not None),
        "elastic ranks change, and a trace is of ranks that stay", "leave trace or elastic out"),
    Excluded(ELASTIC, LOCAL, lambda c:
        "" if local_of(c.option("strategy")) is None else f"strategy={c.option('strategy')!r}: ",
        "elastic ranks train together", "leave elastic out, or choose 'hybrid'"),
    Excluded(ELASTIC, OWN, lambda c:
        "" if config.apart(c.option("strategy")) is None else f"strategy {c.option('strategy')!r}: ",
        "elastic ranks step together", "leave elastic out"),
    Excluded(CHUNKS, "a layer that takes statistics over the global batch", _layer("layer {path!r} "),
        "takes statistics over the global batch, so chunks cannot be computed one by one",
        "use LayerNorm or RMSNorm, or leave chunks out"),
    Excluded(STAGES, "`costs`", _when("stages and costs: ", lambda c: c.option("costs") is not None),
        "the first cuts by hand, the second automatically", "give only one of them"),
)  # fmt: skip


def demand_together(choice: str, chosen: Beside, prefix: str = "") -> None:
    """ConfigError, the same on all ranks, for the first of what a choice excludes and was chosen beside it.

    prefix: how the sentence of the error begins"""
    for row in TABLE:
        if row.choice == choice and (found := row.found(chosen)):
            raise ConfigError(f"{prefix}{found}{row.why}; {row.remedy}")


def is_collective(layer: Layer) -> bool:
    """Whether a layer, or one inside it, speaks with all ranks in each step."""
    return layer.collective or any(map(is_collective, layer.children().values()))


def table() -> str:
    """The table as a page shows it."""
    rows = [f"| {row.choice} | {row.other} | {row.why or 'it has none'} | {row.remedy} |" for row in TABLE]
    return "\n".join(["| with | there is no | because | what to do |", "|---|---|---|---|", *rows])
