"""What cannot be beside strategies by which ranks do not make every step together, why, and what to do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fsdpx.core.trainer.option_rules import (
    ELASTIC,
    SPACE,
    TABLE,
    Beside,
    Excluded,
    has_dynamic_scale,
    if_collective,
    if_given,
    if_true,
    if_wide,
)  # fmt: skip
from fsdpx.ext.asynchronous.local import Local
from fsdpx.ext.asynchronous.own_speed import Async

__all__ = ["LOCAL", "OWN"]

LOCAL, OWN = Local.excluded, Async.excluded


def _other_axis(c: Beside) -> str:
    axis = "replica" if isinstance(c.pace, Async) else "shard"
    return f"there is no {axis} axis, the mesh says {c.mesh}" if c.mesh.width(axis) > 1 else ""


def _norm_of_sum(c: Beside) -> str:
    return if_given("clip_norm")(c) if isinstance(c.pace, Async) and c.pace.staleness == 0 else ""


def _format(name: str) -> Callable[[Beside], str]:
    def found(c: Beside) -> str:
        value = getattr(c.formats, name)
        return "" if value is None else f"{name}={value!r} "

    return found


def _pace(excluded: str) -> Callable[[Beside], str]:
    return lambda c: f"strategy={c.option('strategy')!r} " if c.pace.excluded == excluded else ""


TABLE += (
    Excluded(LOCAL, "`chunks`", if_given("chunks"), "its bits depend on the mesh", "leave chunks out"),
    Excluded(LOCAL, "a dynamic loss scale", if_true("a dynamic loss scale: ", has_dynamic_scale),
        "replicas would skip different steps", "choose a fixed loss_scale, or precision='bf16'"),
    Excluded(LOCAL, "16-bit masters", if_true("16-bit masters: ", lambda c: c.formats.master == "bf16"),
        "outer steps are smaller than their last bit", "precision='bf16'"),
    Excluded(LOCAL, "`average`", if_given("average"), "outer parameters are a mean already", "leave average out"),
    Excluded(LOCAL, "`offload`", if_true("offload: ", lambda c: c.option("offload") is not None),
        "what replicas exchange must be in memory", "leave offload out"),
    Excluded(LOCAL, "a layer that takes statistics over the global batch", if_collective("layer {path!r}: "),
        "it speaks with all ranks in every step", "take one that does not, such as GroupNorm"),
    Excluded(OWN, "a `pipe` axis", if_wide("pipe", "the pipe axis of {width} ranks "), "keeps step", "leave it out"),
    Excluded(OWN, "a `tensor` axis", if_wide("tensor", "the tensor axis of {width} ranks "), "keeps step",
        "leave it out"),
    Excluded(OWN, "another data axis than its own", _other_axis, "", "leave mesh out"),
    Excluded(OWN, "`offload`", if_true("offload: ", lambda c: c.option("offload") is not None),
        "what several ranks change does not lie on one rank's disk", "leave offload out"),
    Excluded(OWN, "`chunks`", if_given("chunks", " "), "adds the gradients of all ranks along a tree",
        "leave chunks out"),
    Excluded(OWN, "`codec`", if_given("codec", " "), "carries sums over ranks, and there are none", "leave codec out"),
    Excluded(OWN, "`clip_norm` with a staleness of 0", _norm_of_sum,
        "no rank knows the norm of the sum before it updates", "leave it out"),
    Excluded(OWN, "a layer that takes statistics over the global batch", if_collective("layer {layer!r} "),
        "takes statistics over the global batch", "use LayerNorm or RMSNorm"),
    Excluded(OWN, "running statistics", lambda c: next((f"running statistics ({name}) " for name in c.state), ""),
        "would differ from rank to rank", "use LayerNorm or RMSNorm"),
    Excluded(OWN, "`device`", lambda c: "" if c.xp is np else f"device={c.option('device')!r}: ",
        "parameters lie in a window in host memory", "use device='cpu'"),
    Excluded(OWN, "a dynamic loss scale", if_true("loss_scale='dynamic' ", has_dynamic_scale),
        "is found by all ranks together", "use a number, or precision='bf16'"),
    Excluded(OWN, "16-bit masters", if_true("parameters that several ranks update ", lambda c:
        c.formats.updated == "bf16"), "are float32 or float64", "use precision='bf16'"),
    *(Excluded(OWN, f"`Precision({name}=)`", _format(name), "is a format of messages, and there are none",
        "leave it out") for name in ("param", "reduce")),
    Excluded(ELASTIC, LOCAL, lambda c:
        "" if c.pace.excluded != LOCAL else f"strategy={c.option('strategy')!r}: ",
        "elastic ranks train together", "leave elastic out, or choose 'hybrid'"),
    Excluded(ELASTIC, OWN, lambda c:
        "" if c.pace.excluded != OWN else f"strategy {c.option('strategy')!r}: ",
        "elastic ranks step together", "leave elastic out"),
    Excluded(SPACE, LOCAL, _pace(LOCAL),
        "lets replicas train by themselves, and the parts of a field make one", "choose 'fsdp'"),
    Excluded(SPACE, OWN, _pace(OWN),
        "lets ranks step at their own speed, and layers exchange cells in each step", "choose 'fsdp'"),
)  # fmt: skip
