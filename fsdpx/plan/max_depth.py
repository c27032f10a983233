"""Creates deeper versions of a model, which have the same width but more blocks."""

from __future__ import annotations

from fsdpx.nn.container import Container, make_steps_of_chain
from fsdpx.nn.layer import Layer

__all__ = ["copy_model_with_block_count", "count_blocks", "count_parameters"]


def count_blocks(model: Layer) -> int:
    """Return the number of blocks in a model such as `nn.GPT` or `nn.Llama`, or 0 if the model has no repeated
    block."""
    found = _find_repeated_blocks(model)
    return 0 if found is None else len(found[1].steps)


def copy_model_with_block_count(model: Layer, layers: int) -> Layer:
    """Return a copy of the model with `layers` blocks."""
    found = _find_repeated_blocks(model)
    assert found is not None
    assert isinstance(model, Container)
    name, blocks = found
    repeated = dict.fromkeys(map(str, range(layers)), blocks.steps[0].layer)
    longer = Container(*make_steps_of_chain(repeated, blocks.inputs[0], blocks.inputs[1:]))
    return model.with_layers(model.children() | {name: longer})


def count_parameters(model: Layer) -> int:
    """Return the number of elements of all parameters; tied parameters count once."""
    return sum(spec.size for spec in model.specs().values() if not spec.state)


def _find_repeated_blocks(model: Layer) -> tuple[str, Container] | None:
    """Return the container that holds the model's repeated blocks, as a pair (name, container). Return None if the
    model has none, or if the blocks are not all equal."""
    for name, child in model.children().items() if isinstance(model, Container) else ():
        if isinstance(child, Container) and len({step.layer for step in child.steps}) == 1 < len(child.steps):
            layers = {step.name: step.layer for step in child.steps}
            if [*child.steps] == make_steps_of_chain(layers, child.inputs[0], child.inputs[1:])[0]:
                return name, child
    return None
