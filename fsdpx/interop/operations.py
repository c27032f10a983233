"""What a unit of a module computes: operations that PyTorch exported, run one by one or compiled by `torch.compile`."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import fx

from fsdpx.errors import ConfigError
from fsdpx.interop.surroundings import draws, settled

__all__ = ["Operations", "backend_of"]

INDUCTOR = "inductor"
Run = Callable[..., torch.Tensor]


class Operations:
    """A function of inputs, parameters and constants. Units that do the same share one, which is compiled once.

    Parameters
    ----------
    graph : of the operations
    backend : of `torch.compile`; None: they run one by one
    """

    def __init__(self, graph: fx.GraphModule, backend: str | None) -> None:
        self.backend, self.draws = backend, draws(graph)
        self._graph = graph
        self._compiled: dict[bool, Run] = {}
        self._lock = threading.Lock()

    def run(self, training: bool, compiled: bool) -> Run:
        """training: what operations that differ between training and evaluation take for granted once compiled."""
        if not compiled or self.backend is None:
            return self._graph
        with self._lock:
            if training not in self._compiled:
                self._compiled[training] = torch.compile(settled(self._graph, training), backend=self.backend)
            return self._compiled[training]


def backend_of(choice: bool | str) -> str | None:
    """The backend that `compile=` asks for. ConfigError for one that is not there, or cannot work here."""
    if not choice:
        return None
    from torch._dynamo.backends.registry import list_backends

    name, known = INDUCTOR if choice is True else choice, list_backends(None)
    if name not in known:
        raise ConfigError(f"compile={choice!r}: PyTorch has no such backend; there are {', '.join(known)}")
    if name == INDUCTOR:
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:
            raise ConfigError(
                f"compile={choice!r} needs a C++ compiler, and PyTorch finds none: install g++, or leave compile out"
            ) from error
    return name
