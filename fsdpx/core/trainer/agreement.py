"""Check at startup that all ranks passed the same model and options, before they exchange any other data."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.state.placement import Placement, StepOptions
from fsdpx.core.state.storage import IN_MEMORY
from fsdpx.core.state.sync_policy import SYNCHRONOUS
from fsdpx.core.state.units import ModelLayout
from fsdpx.core.trainer.batch import checksum_arrays
from fsdpx.core.trainer.recipe import Recipe
from fsdpx.errors import ConfigError
from fsdpx.nn.layer import Layer
from fsdpx.nn.layer_list import LayerList
from fsdpx.nn.losses import Loss
from fsdpx.optim.optimizer import get_scheduled_lr_and_average_weight

__all__ = ["agree_on_choices", "list_choices_to_compare"]


def list_choices_to_compare(recipe: Recipe, placement: Placement, microbatches: int) -> dict[str, Any]:
    """Return the choices that must be equal on all ranks, as a dict keyed by the name of each choice in error messages.

    Parameters
    ----------
    recipe : the model and options that the user passed on this rank
    placement : the placement (mesh, layout, number formats, options) made from the recipe
    microbatches : configured number of microbatches per step

    Returns
    -------
    dict : maps names to choices, which `agree_on_choices` compares as text
    """
    training, layout, sync_choice = recipe.training, placement.layout, recipe.distribution.sync_choice
    return {
        # listed before the mesh, because a different strategy also changes the mesh, but the error should name the
        # strategy
        "strategy": placement.sharding,
        "mesh": placement.axes.mesh,
        "precision": placement.formats.precision,
        "options": replace(placement.options, sync_choice=SYNCHRONOUS, storage=IN_MEMORY),
        "offload": recipe.distribution.offload,
        "model": layout,
        "layers": placement.model,
        "stages": layout.spread.starts,
        "schedule": placement.pipe.format_schedule(placement.accumulation.count_microbatches(microbatches)),
        "domain": repr(recipe.distribution.sample_partition),
        "tensor plan": (recipe.distribution.sequence, sorted(layout.spread.partial)),
        "optimizer": training.optimizer,
        "loss": training.loss,
        "arrays": _describe_checksums_of_layer_arrays(training.model)
        + _describe_checksums_of_layer_arrays(training.loss)
        if placement.sample_layout.has_complete_samples
        else "",
        "compression": placement.codecs,
        "microbatches": microbatches,
        "device": recipe.runtime.device,
        "average": training.average,
        "trace": recipe.runtime.get_trace_choice(),
        "the learning rate of step 1": get_scheduled_lr_and_average_weight(training.optimizer, 1)[0],
        "synchronization": sync_choice.description,
        "outer optimizer": sync_choice.optimizers,
    }


def _describe_checksums_of_layer_arrays(layer_or_loss: Any) -> str:
    """Return one line of text for each layer or loss that has array attributes, such as masks. The line contains a
    checksum of these arrays, because the repr does not show their values."""
    held = [getattr(value, "array", value) for value in getattr(layer_or_loss, "__dict__", {}).values()]
    held = [one for one in held if isinstance(one, np.ndarray) and one.dtype.kind != "O"]
    lines = [f"{layer_or_loss!r} with arrays of sum {checksum_arrays(held):08x}"] if held else []
    children = layer_or_loss.children().values() if isinstance(layer_or_loss, Layer) else ()
    inside = children or _list_child_layers_and_losses(layer_or_loss)
    return "\n".join([*lines, *filter(None, map(_describe_checksums_of_layer_arrays, inside))])


def _list_child_layers_and_losses(holder: Any) -> list[Any]:
    """Return the losses and layers that a loss or layer holds, either directly as attributes, or as elements of tuples
    and lists, such as the terms of a sum."""
    values = list(getattr(holder, "__dict__", {}).values())
    for value in values:  # `values` grows during the loop, so nested lists are also searched
        values += value if isinstance(value, tuple | list) else ()
    return [value for value in values if isinstance(value, Layer | Loss)]


def agree_on_choices(world: Communicator, choices: Mapping[str, Any]) -> None:
    """Raise ConfigError on all ranks if their choices differ. The error names rank 0, the first rank that differs from
    it, and the first differing choice. Collective.

    Parameters
    ----------
    world : communicator of all ranks
    choices : maps the name of each choice, as shown in error messages, to the choice; names and order are the same on
        every rank
    """
    everyone = world.all_gather_value([_choice_to_text(choice) for choice in choices.values()])
    for rank, texts in enumerate(everyone):
        if texts == everyone[0]:
            continue
        for name, first, theirs in zip(choices, everyone[0], texts, strict=True):
            if first != theirs:
                raise ConfigError(_describe_difference(name, first, rank, theirs))


def _describe_difference(name: str, first: str, rank: int, other: str) -> str:
    """Return the error text for a choice that differs between rank 0 (`first`) and `rank` (`other`). The text shows
    every differing line if `name` is "options", and only the first differing line otherwise."""
    lines = zip_longest(first.splitlines(), other.splitlines(), fillvalue="nothing")
    pairs = [(a, b) for a, b in lines if a != b]
    here, there = (", ".join(some) for some in zip(*(pairs if name == "options" else pairs[:1]), strict=True))
    return f"ranks differ in {name}: rank 0 has {here}, rank {rank} has {there}"


def _choice_to_text(choice: Any) -> str:
    """Convert a choice to text. Equal choices give the same text on every rank."""
    if isinstance(choice, str):
        return choice
    if isinstance(choice, StepOptions):
        return "\n".join(f"{field.name}={_choice_to_text(getattr(choice, field.name))}" for field in fields(choice))
    if isinstance(choice, LayerList):
        return "\n".join(f"{node.path} = {_choice_to_text(node.layer)}" for node in choice.nodes)
    if isinstance(choice, ModelLayout):
        specs = ((p.index, f.name, choice.specs[f.source]) for p in choice.pages for f in p.fields)
        facts = [(index, name, spec.shape, getattr(spec.init, "digest", 0)) for index, name, spec in specs]
        return f"a model of {choice.size} parameters, digest {hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"
    try:
        text = repr(choice)
    except RecursionError:  # a layer that contains itself has no finite repr
        return type(choice).__name__
    # remove memory addresses, which differ between ranks
    return re.sub("(<function) .*? at 0x[0-9a-f]+| at 0x[0-9a-f]+", r"\1", text)
