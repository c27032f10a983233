"""PyTorch's modules and losses in fsdpx: `distribute` takes them as they are, and this is how.

trainer = fsdpx.distribute(net, loss=torch.nn.CrossEntropyLoss(), optimizer=fsdpx.optim.AdamW(lr=1e-3))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdpx.errors import ConfigError
from fsdpx.interop.criterion import Criterion
from fsdpx.interop.cut import cut, shared
from fsdpx.interop.module import Module
from fsdpx.interop.operations import backend_of
from fsdpx.interop.tensors import array_of, tensor_of
from fsdpx.nn.container import Chain
from fsdpx.nn.layer import Layer, dotted

__all__ = ["Criterion", "Module", "array_of", "from_torch", "tensor_of"]


def from_torch(
    module: torch.nn.Module,
    *example: Any,
    units: Callable[[str, torch.nn.Module], bool] | Sequence[str] | None = None,
    output: str | int | None = None,
    compile: bool | str = False,
) -> Layer:
    """The layer, or the layers, that compute what `module` does. Parameters keep their names; shared ones are tied.

    Without an example a `torch.nn.Sequential` becomes a `Chain` of its children, and all else one `Module`. With one
    the module is cut: PyTorch exports it (`torch.export`), and every unit is gathered, computed and freed by itself,
    and may be a stage's of a pipe. Units are exported in the format that the module is in.

    Parameters
    ----------
    module : any module that autograd can differentiate
    example : its inputs, arrays or tensors, of at least 2 samples; other sizes may follow
    units : patterns (fnmatch) of classes or paths, such as "LlamaDecoderLayer", or a function of (path, module); None:
        the elements of each `torch.nn.ModuleList`. Other modules with parameters are units by themselves
    output : see `Module`
    compile : `torch.compile` the units of a module that is cut, batch norms excepted; units that do the same are
        compiled once. True: by PyTorch's own backend, which needs a C++ compiler; or the name of a backend

    Raises
    ------
    ConfigError : for a module that PyTorch cannot export, a pattern that fits nothing, units that give several
        tensors, and a backend that cannot work here
    """
    if example:
        return cut(module, example, units, output, backend_of(compile))
    for name, given in (("units", units is not None), ("compile", bool(compile))):
        if given:
            example_of = f"from_torch(module, x, {name}=...)"
            raise ConfigError(f"from_torch({name}=...) needs an example of the inputs: {example_of}")
    if output is not None:
        return Module(module, output=output)
    layers = _children(module)
    if layers is None:
        return Module(module)
    names = {dotted(name, local) for name, layer in layers.items() for local in layer.specs()}
    return Chain(layers, ties={alias: name for alias, name in shared(module).items() if {alias, name} <= names})


def _children(module: torch.nn.Module) -> dict[str, Layer] | None:
    """The layers of a Sequential by name."""
    if type(module) is not torch.nn.Sequential or not len(module):
        return None
    inner = ((name, child, _children(child)) for name, child in module._modules.items() if child is not None)
    return {name: Module(child) if layers is None else Chain(layers) for name, child, layers in inner}
