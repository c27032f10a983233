"""Options that cannot be combined with asynchronous strategies. For each of these options, the error message gives the
reason and an alternative."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fsdpx.core.trainer.option_rules import (
    EXCLUSIONS,
    SPACE,
    ChoiceContext,
    ExcludedPair,
    has_dynamic_loss_scale,
    make_collective_layer_finder,
    make_condition_finder,
    make_given_option_finder,
    make_multi_rank_axis_describer,
)  # fmt: skip
from fsdpx.ext.asynchronous.asynchronous_sgd import AsyncSGD
from fsdpx.ext.asynchronous.local import LocalSGD

__all__ = ["LOCAL", "OWN"]

LOCAL, OWN = LocalSGD.excluded, AsyncSGD.excluded


def _describe_other_axis(c: ChoiceContext) -> str:
    axis = "replica" if isinstance(c.sync_choice, AsyncSGD) else "shard"
    return f"there is no {axis} axis, but the mesh is {c.mesh}" if c.mesh.width_of(axis) > 1 else ""


def _find_clip_norm_with_zero_staleness(c: ChoiceContext) -> str:
    return (
        make_given_option_finder("clip_norm")(c)
        if isinstance(c.sync_choice, AsyncSGD) and c.sync_choice.staleness == 0
        else ""
    )


def _find_model_axis(c: ChoiceContext) -> str:
    found = (
        make_multi_rank_axis_describer(axis, f"the {axis} axis of {{width}} ranks ")(c) for axis in ("pipe", "tensor")
    )
    return next(filter(None, found), "")


def _find_message_format(c: ChoiceContext) -> str:
    formats = {name: getattr(c.formats, name) for name in ("param", "reduce")}
    return next((f"{name}={value!r} " for name, value in formats.items() if value is not None), "")


def _make_sync_choice_finder(excluded: str) -> Callable[[ChoiceContext], str]:
    return lambda c: f"strategy={c.get_option('strategy')!r} " if c.sync_choice.excluded == excluded else ""


EXCLUSIONS += (
    ExcludedPair(LOCAL, "`reproducible_chunks`", make_given_option_finder("reproducible_chunks"),
        "results depend on the mesh", "leave reproducible_chunks out"),
    ExcludedPair(LOCAL, "a dynamic loss scale", make_condition_finder("a dynamic loss scale: ", has_dynamic_loss_scale),
        "replicas would skip different steps", "choose a fixed loss_scale, or precision='bf16'"),
    ExcludedPair(LOCAL, "16-bit masters",
        make_condition_finder("16-bit masters: ", lambda c: c.formats.master == "bf16"),
        "outer steps are smaller than their rounding error", "use precision='bf16'"),
    ExcludedPair(LOCAL, "`average`",
        make_given_option_finder("average"), "the outer parameters are already a mean", "leave average out"),
    ExcludedPair(LOCAL, "`offload`", make_condition_finder("offload: ", lambda c: c.get_option("offload") is not None),
        "replicas exchange state that must be in memory", "leave offload out"),
    ExcludedPair(LOCAL, "a collective layer, such as BatchNorm",
        make_collective_layer_finder("layer {path!r}: "),
        "it communicates with all ranks in every step", "take one that does not, such as GroupNorm"),
    ExcludedPair(OWN, "a `pipe` or `tensor` axis", _find_model_axis, "needs ranks that step together", "leave it out"),
    ExcludedPair(OWN, "a second data axis", _describe_other_axis, "", "leave mesh out"),
    ExcludedPair(OWN, "`offload`", make_condition_finder("offload: ", lambda c: c.get_option("offload") is not None),
        "state that several ranks change cannot be on one rank's disk", "leave offload out"),
    ExcludedPair(OWN, "`reproducible_chunks`",
        make_given_option_finder("reproducible_chunks", " "),
        "adds the gradients of all ranks in each step", "leave reproducible_chunks out"),
    ExcludedPair(OWN, "`compression`", make_given_option_finder("compression", " "),
        "compresses sums over ranks, which are not computed here", "leave compression out"),
    ExcludedPair(OWN, "`clip_norm` with a staleness of 0", _find_clip_norm_with_zero_staleness,
        "no rank knows the norm of the sum before it updates", "leave it out"),
    ExcludedPair(OWN, "a collective layer, such as BatchNorm",
        make_collective_layer_finder("layer {layer!r} "),
        "takes statistics over the global batch", "use LayerNorm or RMSNorm"),
    ExcludedPair(OWN, "running statistics", lambda c: next((f"running statistics ({name}) " for name in c.state), ""),
        "would differ from rank to rank", "use LayerNorm or RMSNorm"),
    ExcludedPair(OWN, "`device`", lambda c: "" if c.xp is np else f"device={c.get_option('device')!r}: ",
        "parameters are in a window in host memory", "use device='cpu'"),
    ExcludedPair(OWN, "a dynamic loss scale", make_condition_finder("loss_scale='dynamic' ", has_dynamic_loss_scale),
        "needs all ranks to step together", "use a number, or precision='bf16'"),
    ExcludedPair(OWN, "16-bit masters",
        make_condition_finder("16-bit masters: ", lambda c: c.formats.master_dtype == "bf16"),
        "parameters that several ranks update are float32 or float64", "use precision='bf16'"),
    ExcludedPair(OWN, "`Precision(param=)` and `Precision(reduce=)`", _find_message_format,
        "sets a message format, but no messages are sent", "leave it out"),
    ExcludedPair(SPACE, LOCAL, _make_sync_choice_finder(LOCAL),
        "lets replicas train independently, but the parts of a field belong to one replica", "choose 'fsdp'"),
    ExcludedPair(SPACE, OWN, _make_sync_choice_finder(OWN),
        "lets ranks step at their own speed, but layers exchange cells in each step", "choose 'fsdp'"),
)  # fmt: skip
