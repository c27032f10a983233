"""Composite: a layer that is written as a function of other layers; its backward follows from theirs."""

from __future__ import annotations

import inspect
from abc import ABCMeta, abstractmethod
from collections.abc import Mapping
from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.nn.container import ChildCall, Container, check_name, outputs_of
from fsdpx.nn.layer import Layer
from fsdpx.nn.shape import Add, Multiply

__all__ = ["Composite", "Value"]

WORKS = "compose works on its arguments and on what layers give"


def _refused(sign: str) -> Any:
    """An operator that values do not have."""

    def refuse(self: Value, *others: Any) -> Any:
        raise self.cannot(f"has no {sign}")

    return refuse


class Value:
    """What layers read and give in `Composite.compose`, before there is data. `a + b` is `Add()(a, b)`, `a * b` is
    `Multiply()(a, b)`."""

    __slots__ = ("name", "tracing")

    def __init__(self, trace: ComposeTrace, name: str) -> None:
        self.tracing, self.name = trace, name

    def __repr__(self) -> str:
        return f"the value {self.name!r} of {self.tracing.owner}"

    def __add__(self, other: Any) -> Any:
        return Add()(self, other)

    def __mul__(self, other: Any) -> Any:
        return Multiply()(self, other)

    __radd__, __rmul__ = __add__, __mul__  # of a number, which is refused
    __sub__ = __rsub__ = __neg__ = _refused("-")
    __truediv__ = __rtruediv__ = _refused("/")
    __pow__ = __rpow__ = _refused("**")
    __matmul__ = __rmatmul__ = _refused("@")
    __lt__, __le__, __gt__, __ge__ = map(_refused, ("<", "<=", ">", ">="))
    __getitem__, __iter__, __len__ = _refused("[]"), _refused("parts"), _refused("length")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of a protocol that Python or a library probes for
            raise AttributeError(name)
        raise self.cannot(f"has no {name}")

    def __array_ufunc__(self, ufunc: Any, method: str, *x: Any, **options: Any) -> Any:
        raise self.cannot(f"is given to np.{ufunc.__name__}")

    def __array_function__(self, function: Any, types: Any, x: Any, options: Any) -> Any:
        raise self.cannot(f"is given to np.{function.__name__}")

    def cannot(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.tracing.owner}: the value {self.name!r} {what}; {WORKS}, with layers, + and *: for another "
            "function of each element use nn.Lambda, for other shapes, sums and parts a layer"
        )


class ComposeTrace:
    """The steps of a container while `compose` runs. named: the layers that are attributes of `owner`.

    A layer that is called again is another step, whose parameters are tied to those of the first."""

    def __init__(self, owner: str, named: dict[str, Layer], inputs: tuple[str, ...]) -> None:
        self.owner, self.steps, self.ties = owner, list[ChildCall](), dict[str, str]()
        self.inputs = [Value(self, name) for name in inputs]
        self._named, self._taken = named, {*named, *inputs}

    def applied(self, layer: Layer, x: tuple[Any, ...]) -> Any:
        """What `layer` gives for the values `x`: a value, or a tuple of them."""
        for value in x:
            self.check(value, f"{layer!r} gets")
        if layer.n_inputs not in (None, len(x)):
            raise ConfigError(f"{self.owner}: {layer!r} takes {layer.n_inputs} inputs, but gets {len(x)}")
        name = self._name(layer)
        step = ChildCall(name, layer, tuple(value.name for value in x), outputs_of(name, layer))
        self.steps.append(step)
        values = tuple(Value(self, gives) for gives in step.gives)
        return values[0] if len(values) == 1 else values

    def check(self, value: Any, who: str) -> str:
        """The name of a value of this trace."""
        if not isinstance(value, Value) or value.tracing is not self:
            raise ConfigError(
                f"{self.owner}: {who} {value!r}; {WORKS}: for a number or a function of numpy use nn.Lambda"
            )
        return value.name

    def _name(self, layer: Layer) -> str:
        first = next((name for name, known in self._named.items() if known is layer), None)
        if first is None and layer.specs():
            raise ConfigError(
                f"{self.owner}: {layer!r} has parameters, but no name: make it an attribute in __init__, "
                "self.name = ..., and call that; of a list each by setattr(self, f'name_{i}', ...), or as one nn.Chain"
            )
        if first is not None and all(step.layer is not layer for step in self.steps):
            return first
        name = base = first or type(layer).__name__.lower()
        number = 1
        while name in self._taken:
            number += 1
            name = f"{base}_{number}"
        self._taken.add(name)
        if first is not None:
            if any(spec.state for spec in layer.specs().values()):
                raise ConfigError(f"{self.owner}: {layer!r} has running statistics, so compose can call it only once")
            self.ties |= {f"{name}.{parameter}": f"{first}.{parameter}" for parameter in layer.specs()}
        return name


class Composing(ABCMeta):
    """Composes a layer when its `__init__` is done, that of a subclass included."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        layer = super().__call__(*args, **options)
        layer._composed()
        return layer


class Composite(Container, metaclass=Composing):
    """A layer of your own that holds other layers and says once what it does with them:

        class GatedMLP(nn.Composite):
            def __init__(self, d_model, d_hidden):
                self.gate = nn.Linear(d_model, d_hidden)
                self.up = nn.Linear(d_model, d_hidden)
                self.down = nn.Linear(d_hidden, d_model)

            def compose(self, x):
                return self.down(nn.SiLU()(self.gate(x)) * self.up(x))

    `compose` runs once, when the layer is made; it becomes a graph whose backward follows from the layers'. Parameters
    are named by attributes (`gate.weight`). ConfigError for a layer with parameters that is no attribute, for one that
    is never called, and for anything but layers done with a value."""

    reads: tuple[str, ...] = ()
    """The names of the inputs, where `compose(self, *x)` takes more or fewer of them by what `__init__` was told."""

    def __init__(self) -> None:
        """Subclasses need not call it: the steps come from `compose`."""

    @abstractmethod
    def compose(self, *x: Any) -> Any:
        """The result, or a tuple of them, from one argument for each input: layers called on values, and their sums and
        products."""

    def _composed(self) -> None:
        owner = type(self).__name__
        if taken := sorted({"steps", "inputs", "outputs", "ties"} & vars(self).keys()):
            raise ConfigError(f"{owner}: {taken[0]!r} is an attribute that every container has; choose another name")
        inputs: Mapping[str, Any] = inspect.signature(self.compose).parameters
        if self.reads:
            inputs = dict.fromkeys(self.reads)
        elif not inputs or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in inputs.values()):
            raise ConfigError(f"{owner}: compose takes one argument by name for each input, compose(self, x)")
        named = {check_name(owner, name): child for name, child in vars(self).items() if isinstance(child, Layer)}
        trace = ComposeTrace(owner, named, tuple(inputs))
        found = self.compose(*trace.inputs)
        outputs = [trace.check(value, "compose returns") for value in (found if isinstance(found, tuple) else (found,))]
        called = [step.layer for step in trace.steps]
        for name, child in named.items():
            if all(child is not layer for layer in called):
                raise ConfigError(f"{owner}: compose never calls self.{name}, {child!r}: call it, or leave it out")
        Container.__init__(self, trace.steps, tuple(inputs), outputs, trace.ties)
