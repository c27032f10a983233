"""One forward of a module, recorded by PyTorch's autograd in such a way that the engine owns what backward needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from fsdpx.interop.tensors import array_of, tensor_of

__all__ = ["Derivatives", "Recorded", "Run"]

Arrays = Mapping[str, Any]
Run = Callable[[dict[str, torch.Tensor], list[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Derivatives:
    """inputs: one for each input, None for those of integers. parameters: by name, of those that had an effect."""

    inputs: list[torch.Tensor | None]
    parameters: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Source:
    """Where a tensor that backward needs is found again: in parameter `name`, or in kept array number `number`."""

    name: str | None
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    kind: torch.dtype


class Recorded:
    """The graph of one forward; the arrays that backward needs are `kept`, and are given back to `backward`.

    Parameters are not among them: in backward their page was gathered once more, and may lie elsewhere.

    Parameters
    ----------
    xp : namespace of all arrays
    run : gives the result for (parameters and buffers by name, inputs)
    inputs : arrays; those of floats have a gradient
    given : parameters and buffers by name
    trained : the names of those that have a gradient
    device : of PyTorch, for arrays that hold no data
    compiled : `run` is, and its compiler must not look at what is done around it
    """

    def __init__(
        self, xp: Any, run: Run, inputs: Sequence[Any], given: Arrays, trained: frozenset[str], device: str = "meta",
        compiled: bool = False,
    ) -> None:  # fmt: skip
        self._device, self._bare = device, getattr(xp, "holds_no_data", False)
        self.kept: tuple[Any, ...] = ()
        self._tensors = {name: tensor_of(a, device).requires_grad_(name in trained) for name, a in given.items()}
        self._owners = {_memory(tensor): name for name, tensor in self._tensors.items()}
        self._leaves = {name: tensor for name, tensor in self._tensors.items() if name in trained}
        self._held: list[torch.Tensor] = []
        self._dy: list[torch.Tensor] = []
        read = [_Inlet.apply(torch.empty(0, requires_grad=True), [tensor_of(a, device)]) for a in inputs]
        self._inlets = [get_gradient_edge(t) if t.requires_grad else None for t in read]
        hooks = (self._pack, self._unpack)
        if compiled:
            hooks = (torch.compiler.disable(self._pack), torch.compiler.disable(self._unpack))
        with torch.enable_grad(), saved_tensors_hooks(*hooks):
            y = run(self._tensors, read)
            end = _Outlet.apply(y, self._dy) if y.requires_grad else None
        self.wrote = [name for name, tensor in self._tensors.items() if tensor._version]
        self.wrote += [f"input {i}" for i, tensor in enumerate(read) if tensor._version]
        self._outlet: GradientEdge | None = None if end is None else get_gradient_edge(end)
        self.output = array_of(xp, y)
        self.kept = _arrays(xp, self._held, list(zip(read, inputs, strict=True)))
        self._held, self._tensors = [], {}

    def backward(
        self, given: Arrays, kept: Sequence[Any], dy: Any, inputs: bool, trained: Sequence[str]
    ) -> Derivatives:
        """given: the parameters as they lie now. kept: the arrays. inputs: whether gradients of inputs are wanted.

        Can be called once: the graph is freed."""
        edges = [edge for edge in self._inlets if inputs and edge is not None]
        leaves = [self._leaves[name] for name in trained]
        if self._outlet is None or not edges + leaves:
            return Derivatives([None] * len(self._inlets), {})
        self._tensors = {name: tensor_of(a, self._device) for name, a in given.items()}
        self._held = [] if self._bare else [tensor_of(a) for a in kept]
        self._dy.append(tensor_of(dy, self._device))
        found = torch.autograd.grad([self._outlet], [*edges, *leaves], allow_unused=True)
        self._held, self._tensors, self._outlet = [], {}, None
        at_inputs = iter(found[: len(edges)])
        dx = [next(at_inputs) if inputs and edge is not None else None for edge in self._inlets]
        pairs = zip(trained, found[len(edges) :], strict=True)
        return Derivatives(dx, {name: gradient for name, gradient in pairs if gradient is not None})

    def _pack(self, tensor: torch.Tensor) -> _Source:
        tensor = tensor.detach()
        name = self._owners.get(_memory(tensor))
        if name is not None and self._tensors[name].dtype != tensor.dtype:
            name = None
        if name is None:
            self._held.append(tensor)
        return _Source(name, len(self._held) - 1, tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def _unpack(self, place: _Source) -> torch.Tensor:
        if place.name is not None:
            return self._tensors[place.name].detach().as_strided(place.size, place.stride, place.offset)
        if self._bare:
            return torch.zeros(place.size, dtype=place.kind, device=self._device)
        return self._held[place.number]


class _Inlet(torch.autograd.Function):
    """An input as the beginning of a graph that does not hold it: a leaf would live as long as the graph."""

    @staticmethod
    def forward(ctx: Any, begin: torch.Tensor, x: list[torch.Tensor]) -> torch.Tensor:
        """x: in a list, which autograd does not look into: the result is no view of an input."""
        if not x[0].is_floating_point():
            ctx.mark_non_differentiable(x[0])
        return x[0]

    @staticmethod
    def backward(ctx: Any, *dx: Any) -> tuple[None, None]:
        return None, None


class _Outlet(torch.autograd.Function):
    """The end of a graph: one number, of which the gradient is never asked for. `autograd.grad` of any other result
    compares shapes by what imports a computer algebra system."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, dy: list[torch.Tensor]) -> torch.Tensor:
        """dy: the gradient of y stands in it when backward begins."""
        ctx.dy = dy
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *one: Any) -> tuple[torch.Tensor, None]:
        return ctx.dy.pop(), None


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _arrays(xp: Any, held: Sequence[torch.Tensor], inputs: Sequence[tuple[torch.Tensor, Any]]) -> tuple[Any, ...]:
    """As arrays; without data, what shares memory is the same array, so that it is counted once."""
    if not getattr(xp, "holds_no_data", False):
        return tuple(array_of(xp, tensor) for tensor in held)
    known = {_memory(tensor): array for tensor, array in inputs}
    for tensor in held:
        if _memory(tensor) not in known:
            known[_memory(tensor)] = xp.empty((tensor.untyped_storage().nbytes(),), dtype="uint8")
    return tuple(known[_memory(tensor)] for tensor in held)
