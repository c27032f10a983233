"""Messages between stages: values on their way to the next reader, and gradients on their way back."""

from typing import Any

import numpy as np

from fsdpx.engine.engine import Engine
from fsdpx.engine.gradients import Pending
from fsdpx.errors import ShapeError
from fsdpx.program import Edge
from fsdpx.state.pipe import tag

__all__ = ["receive", "send"]


def send(engine: Engine, edge: Edge, mb: int, value: Any, action: str) -> None:
    """Start to send a value; the interpreter waits for the end of the message at the end of the program."""
    expected = _expected(engine, edge, mb)
    if expected is None:
        return
    xp = engine.xp
    if value is None:  # a gradient: nothing that counts depends on the value
        value = xp.zeros(expected.shape, dtype=expected.dtype)
    if tuple(value.shape) != tuple(expected.shape) or value.dtype != expected.dtype:
        raise ShapeError(
            f"{action}: value {edge.value} is {value.dtype}{list(value.shape)}, rank {edge.receiver} of the pipe "
            f"expects {expected.dtype}{list(expected.shape)}: shapes of values may depend on shapes only"
        )
    flat = xp.ascontiguousarray(value).reshape(-1)
    handle = engine.axes.pipe.send(flat, edge.receiver, _tag(engine, edge, mb), what=_what(engine, edge, action))
    pending = Pending(handle, lambda: flat)  # which keeps the array until it is sent
    engine.flying.append(("pipe", pending))
    engine.sends.append(pending)


def receive(engine: Engine, edge: Edge, mb: int, action: str) -> Any:
    """The value, on its way; None where nothing travels."""
    expected = _expected(engine, edge, mb)
    if expected is None:
        return None
    flat = engine.xp.empty((expected.size,), dtype=expected.dtype)
    handle = engine.axes.pipe.recv(flat, edge.sender, _tag(engine, edge, mb), what=_what(engine, edge, action))
    return Pending(handle, lambda: flat.reshape(expected.shape))


def _expected(engine: Engine, edge: Edge, mb: int) -> Any:
    """What travels, as a shape-only array: nothing for a rank without samples, and no gradient of whole numbers."""
    batch = engine.batch[mb]
    if batch is None:
        return None
    value = engine.message(edge.value, batch)
    return None if edge.gradient and np.dtype(value.dtype).kind in "iub" else value


def _tag(engine: Engine, edge: Edge, mb: int) -> int:
    return tag(engine.stage, edge, mb, len(engine.batch))


def _what(engine: Engine, edge: Edge, action: str) -> str:
    node = engine.model.nodes[edge.value - len(engine.model.inputs)]
    return f"{action} {'gradient' if edge.gradient else 'output'} of {node.path!r}"
