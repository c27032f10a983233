"""A layer: a stateless recipe for forward and for backward in two halves; it owns no arrays."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fsdpx.errors import ConfigError
from fsdpx.nn.cut import Cut
from fsdpx.nn.describe import describe
from fsdpx.nn.gradients import Gradients
from fsdpx.nn.init import Init, zeros

if TYPE_CHECKING:
    from fsdpx.array.random import Random
    from fsdpx.comm.mesh import Axes

__all__ = ["Array", "Env", "Layer", "Spec", "branches", "join", "prefixed"]

NO_TIES: dict[str, str] = {}
Array = Any
"""A NumPy, CuPy or shape-only array."""


@dataclass(frozen=True)
class Spec:
    """One parameter of a layer.

    shape: as PyTorch has it, of the whole parameter. init: see `fsdpx.nn.init`. trainable: it gets a gradient and is
    updated. state: it is written by `forward` itself when training (running statistics); never trainable.
    cut: how it lies over the tensor axis; None: whole on every rank. It is created, saved and compared whole.
    """

    shape: tuple[int, ...]
    init: Init = zeros
    trainable: bool = True
    state: bool = False
    cut: Cut | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "trainable", self.trainable and not self.state)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Env:
    """All that a layer may know of the world.

    xp: the array namespace (numpy, cupy or `fsdpx.array.shapes`). mesh: the connected axes, for layers that
    sum over ranks. random: counter-based numbers of this layer, step and global row. training: dropout drops,
    statistics move. recompute: names of what layers do not keep for backward but make again ("attention").
    again: this forward repeats an earlier one for backward, so state must not move a second time.
    """

    xp: Any
    mesh: Axes
    random: Random
    training: bool = True
    recompute: frozenset[str] = frozenset()
    again: bool = False

    def at(self, name: str) -> Env:
        """The same world one name further down: the random numbers of child `name`."""
        return Env(self.xp, self.mesh, self.random.at(name), self.training, self.recompute, self.again)


class Layer(ABC):
    """What is computed: configuration only, shared by all ranks, safe to use in several places.

    Arrays: dim 0 of every input and output is samples, and it may be 0. `p` maps the names of `specs()` to
    arrays, which are views of flat buffers; `g` maps only the trainable names to gradients, into which a
    layer *adds*. Neither the inputs nor `dy` may be changed; a result may be a view of them.
    """

    n_inputs: int | None = 1
    """How many arrays `forward` takes (a tuple when not 1); None: any number."""
    n_outputs: int = 1
    """How many arrays `forward` gives; only containers give more than one."""
    cheap: bool = False
    """Its result costs no more than a pass over memory: a container keeps what `again` needs instead of it."""
    collective: bool = False
    """It calls collectives over `env.mesh.data`: all ranks there must run it equally often."""

    acts_on: str = "sample"
    """The least it treats by itself: "sample" (dim 0), "position" (dims 0 and 1) or "element". Layers that act on
    positions can be run on a part of a sequence, those that act on elements also on a part of the features."""

    runs: tuple[str, ...] = ()
    """Names of the kernels it runs (`fsdpx.array.kernels`), children's left out: compiled before the first step."""

    _distribute: ClassVar[Callable[..., Any]]
    """`fsdpx.distribute`; set by the package `fsdpx`, because layers import nothing that uses them."""

    def specs(self) -> dict[str, Spec]:
        """Name -> `Spec` of every parameter, children's included with dotted names."""
        return {}

    def children(self) -> dict[str, Layer]:
        """Name -> layer inside this one."""
        return {}

    def again(self, env: Env, p: Mapping[str, Array], saved: Any) -> Array:
        """The result of `forward`, from what it saved; for layers that are `cheap`."""
        raise ConfigError(f"{self!r} is cheap but does not define again")

    @abstractmethod
    def forward(self, env: Env, p: Mapping[str, Array], x: Any) -> tuple[Any, Any]:
        """`(y, saved)`: the result and a tuple of what backward needs (references, not copies)."""

    @abstractmethod
    def backward_input(self, env: Env, p: Mapping[str, Array], saved: Any, dy: Any) -> tuple[Any, Any]:
        """`(dx, kept)`: the input's gradient (None for integers, a tuple for several), and what is kept."""

    def backward_params(self, env: Env, g: Mapping[str, Array], kept: Any) -> None:
        """Add the gradients of the parameters into `g`; a name that is missing there is frozen."""
        if g:
            raise ConfigError(f"{self!r} has parameters ({', '.join(g)}) but does not define backward_params")

    def backward(self, env: Env, p: Mapping[str, Array], g: Mapping[str, Array], saved: Any, dy: Any) -> Any:
        """Both halves of backward: adds into `g`, returns `dx`. Defined anew where they are cheaper together."""
        dx, kept = self.backward_input(env, p, saved, dy)
        if g:
            self.backward_params(env, g, kept)
        return dx

    def backward_leaf(self, env: Env, p: Mapping[str, Array], g: Mapping[str, Array], saved: Any, dy: Any) -> None:
        """`backward` where nobody reads `dx`: the input is data. Defined anew where `dx` is dear."""
        self.backward(env, p, g, saved, dy)

    def as_distributed(self, **options: Any) -> Any:
        """A `fsdpx.Trainer` of this model; the options are those of `fsdpx.distribute`."""
        return self._distribute(self, **options)

    def __repr__(self) -> str:
        return describe(self)


def join(path: str, name: str) -> str:
    """Dotted path of `name` below `path`; the root's path is empty."""
    return f"{path}.{name}" if path and name else path or name


def prefixed(children: Iterable[tuple[str, Layer]]) -> dict[str, Spec]:
    """All specs of `children`, each name behind its child's."""
    return {join(name, leaf): spec for name, layer in children for leaf, spec in layer.specs().items()}


def branches(arrays: Mapping[str, Array]) -> Mapping[str, Mapping[str, Array]]:
    """Dotted names cut at their first dot: `{"attn.qkv.weight": a}` -> `{"attn": {"qkv.weight": a}}`."""
    if isinstance(arrays, Gradients):
        return arrays.branches(NO_TIES)
    grouped: dict[str, dict[str, Array]] = {}
    for name, array in arrays.items():
        head, _, rest = name.partition(".")
        grouped.setdefault(head, {})[rest] = array
    return grouped
