"""Checks of a trainer's options, and the table of pairs of options that cannot be combined. For each pair, the table
gives a reason and a remedy; error messages and a page of the docs are generated from the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from inspect import isfunction
from typing import Any, NamedTuple

import numpy as np

from fsdpx import optim
from fsdpx.core.base.extensions import import_declared_extension, list_extensions
from fsdpx.core.base.messages import shorten_value
from fsdpx.core.base.name_hints import parse_patterns
from fsdpx.core.comm.mesh import Mesh
from fsdpx.core.state.sample_layout import Domain
from fsdpx.errors import ConfigError, page_hint
from fsdpx.nn import losses
from fsdpx.nn.layer import Layer
from fsdpx.nn.layer_list import LayerList
from fsdpx.optim.optimizer import needs_full_parameters

__all__ = [
    "CHUNKS",
    "EXCLUSIONS",
    "SPACE",
    "STAGES",
    "ChoiceContext",
    "ExcludedPair",
    "format_exclusion_lists",
    "has_dynamic_loss_scale",
    "is_collective_layer",
    "make_collective_layer_finder",
    "make_condition_finder",
    "make_given_option_finder",
    "make_multi_rank_axis_describer",
    "require_compatible_options",
    "require_mesh_for_options",
    "require_optimizer_supports_tensor_axis",
    "require_valid_model_loss_and_optimizer",
]  # fmt: skip


@dataclass(frozen=True)
class ChoiceContext:
    """Input of the checks for options that cannot be combined: the user's options and, as far as they are already
    known, the model, the mesh and the number formats.

    Parameters
    ----------
    recipe : all options that the user passed
    model : the layers of the model in execution order
    formats : number formats of parameters, gradients and so on, as a `Precision`
    mesh : the mesh, with the widths of all axes
    state : names of the running statistics
    xp : array module, such as `numpy`
    rounding : name of the codec or number format that rounds gradients when they are sent; "" if they are not rounded
    """

    recipe: Any
    model: LayerList | None = None
    formats: Any = None
    mesh: Any = None
    state: Iterable[str] = ()
    xp: Any = np
    rounding: str = ""

    @property
    def first_communicating_layer_call(self) -> Any:
        """The first node (layer call) of the model whose layer communicates in each step, such as BatchNorm; None if
        there is none.
        """
        nodes = () if self.model is None else self.model.nodes
        return next((node for node in nodes if is_collective_layer(node.layer)), None)

    @property
    def sync_choice(self) -> Any:
        """The synchronization policy selected by the option `strategy`."""
        return self.recipe.distribution.sync_choice

    def get_option(self, name: str) -> Any:
        """Return the value of the option `name` in the recipe."""
        parts = self.recipe.training, self.recipe.distribution, self.recipe.runtime
        return next(getattr(part, name) for part in parts if hasattr(part, name))


class ExcludedPair(NamedTuple):
    """Two options that cannot be used together.

    Parameters
    ----------
    choice, other : names of the two options, as written in the docs
    found : function of a `ChoiceContext`. If the user set `other`, it returns the beginning of the error message, such
        as "reproducible_chunks=4 "; otherwise it returns ""
    why : why the two options cannot be combined
    remedy : what to do instead
    """

    choice: str
    other: str
    found: Callable[[ChoiceContext], str]
    why: str
    remedy: str


def make_given_option_finder(name: str, end: str = ": ") -> Callable[[ChoiceContext], str]:
    """Return a function for `ExcludedPair.found` that detects whether an option is set (not None), and describes it as
    "name=value" followed by `end`."""
    return lambda c: "" if c.get_option(name) is None else f"{name}={c.get_option(name)!r}{end}"


def make_multi_rank_axis_describer(axis: str, text: str) -> Callable[[ChoiceContext], str]:
    """Return a function for `ExcludedPair.found` that detects whether a mesh axis has more than one rank, and describes
    it with `text`, in which {width} and {mesh} are replaced by their values."""

    def find_wide(c: ChoiceContext) -> str:
        return text.format(width=c.mesh.width_of(axis), mesh=c.mesh) if c.mesh.width_of(axis) > 1 else ""

    return find_wide


def make_condition_finder(text: str, condition: Callable[[ChoiceContext], bool]) -> Callable[[ChoiceContext], str]:
    """Return a function for `ExcludedPair.found` that returns `text` if `condition` is true for the user's options."""
    return lambda c: text if condition(c) else ""


def has_dynamic_loss_scale(c: ChoiceContext) -> bool:
    """Return whether the precision uses a dynamic loss scale."""
    return c.formats is not None and c.formats.loss_scale == "dynamic"


def make_collective_layer_finder(text: str) -> Callable[[ChoiceContext], str]:
    """Return a function for `ExcludedPair.found`. If any layer communicates in each step, the function returns `text`,
    with {path} and {layer} filled in for the first such layer. Otherwise, it returns ""."""
    return lambda c: (
        ""
        if c.first_communicating_layer_call is None
        else text.format(path=c.first_communicating_layer_call.path, layer=c.first_communicating_layer_call.layer)
    )


CHUNKS, STAGES, SPACE = "`reproducible_chunks`", "`stages`", Domain.excluded
EXCLUSIONS: list[ExcludedPair] = [
    ExcludedPair(CHUNKS, "a collective layer, such as BatchNorm",
        make_collective_layer_finder("layer {path!r} "),
        "takes statistics over the global batch, so chunks cannot be computed one by one",
        "use LayerNorm or RMSNorm, or leave reproducible_chunks out"),
    ExcludedPair(CHUNKS, "compression (`compression`, or `Precision(reduce=)` of fewer bits)", lambda c:
        f"{c.rounding} " if c.rounding else "",
        "rounds gradients before they are sent, so results depend on the number of ranks", "leave one of the two out"),
    ExcludedPair(SPACE, "`reproducible_chunks`",
        make_given_option_finder("reproducible_chunks", " "),
        "splits the batch by samples, but each rank has a part of every sample", "leave reproducible_chunks out"),
    ExcludedPair(SPACE, "a `tensor` axis", make_multi_rank_axis_describer("tensor", "a tensor axis of {width} ranks "),
        "splits matrices, but field layers have none to split", "use these ranks as further parts of the grid"),
    ExcludedPair(STAGES, "`costs`",
        make_condition_finder("stages and costs: ", lambda c: c.get_option("costs") is not None),
        "stages sets how the model is split, but costs computes the split", "give only one of them"),
]  # fmt: skip
"""All excluded pairs of options. Extensions append their own pairs."""


def require_compatible_options(choice: str, chosen: ChoiceContext, prefix: str = "") -> None:
    """Raise ConfigError if the user has set an option that cannot be combined with `choice`. The error begins with
    `prefix`, names the first conflicting option in `EXCLUSIONS`, and is the same on all ranks."""
    for row in EXCLUSIONS:
        if row.choice == choice and (conflict := row.found(chosen)):
            raise ConfigError(f"{prefix}{conflict}{row.why}; {row.remedy}")


def is_collective_layer(layer: Layer) -> bool:
    """Return whether a layer or one of its child layers communicates with all ranks in each step."""
    return layer.collective or any(map(is_collective_layer, layer.children().values()))


def format_exclusion_lists() -> str:
    """Return the pairs of options that cannot be combined, including the pairs that extensions add, as one Markdown
    list per option. Omit a remedy that only says not to use an option."""
    for kind in ("strategy", "ranks"):
        for name in list_extensions(kind):
            import_declared_extension(kind, name)
    lists: dict[str, list[str]] = {}
    for row in EXCLUSIONS:
        is_omission = row.remedy.startswith("leave ") and row.remedy.endswith(" out")
        text = "; ".join(filter(None, (row.why, "" if is_omission else row.remedy)))
        lists.setdefault(row.choice, []).append(f"- {row.other}: {text}" if text else f"- {row.other}")
    return "\n\n".join(
        f"**{choice[0].upper()}{choice[1:]}** cannot be combined with\n\n" + "\n".join(items)
        for choice, items in sorted(lists.items())
    )


def require_mesh_for_options(mesh: Mesh | None, stages: Any, costs: Any, plan: Any, sequence: Any) -> None:
    """Raise ConfigError if an option that needs a mesh axis is set but no mesh is given. If a mesh is given but the
    axis has only one rank, the option is allowed and has no effect."""
    for name, given, axis in (
        ("stages", stages, "pipe"),
        ("costs", costs, "pipe"),
        ("tensor_plan", plan, "tensor"),
        ("sequence", sequence, "tensor"),
    ):
        if given is not None and mesh is None:
            raise ConfigError(f"{name}={given!r}: there is no {axis} axis; say mesh=fsdpx.Mesh({axis}=2, ...)")


def require_valid_model_loss_and_optimizer(model: Any, loss: Any, optimizer: Any, mesh: Any, frozen: Any) -> None:
    """Raise ConfigError unless model, loss, optimizer, mesh and the name patterns of frozen parameters have the right
    types."""
    if not isinstance(model, Layer):
        raise ConfigError(f"the model is {model!r}: a layer such as nn.Sequential(...) is needed")
    for name, value, methods in (
        ("loss", loss, ("forward", "backward", "validate")),
        ("optimizer", optimizer, ("update", "slots", "lr")),
    ):
        if isinstance(value, type) or not all(hasattr(value, method) for method in methods):
            raise ConfigError(
                suggest_for_torch_object(value)
                or f"{name}={shorten_value(value)}: an object is needed{_suggest_instance(name, value)}"
            )
    if mesh is not None and not isinstance(mesh, Mesh):
        parsed = f", such as fsdpx.Mesh.parse({mesh!r})" if isinstance(mesh, str) else ""
        raise ConfigError(f"mesh={mesh!r}: fsdpx.Mesh(...) is needed{parsed}")
    if isinstance(frozen, str):
        raise ConfigError(f"frozen={frozen!r}: a list of name patterns is needed, [{frozen!r}]")
    parse_patterns("frozen", frozen)


def _suggest_instance(name: str, value: Any) -> str:
    """Return the end of an error message. It suggests an object to pass as the argument `name`. The suggestion depends
    on whether the user passed a class, a name or a function."""
    if isinstance(value, type):
        return f", {value.__name__}(...)"
    if isinstance(value, str):
        plain = value.lower().replace("_", "").replace("-", "")
        similar = [f", optim.{name}(lr=...)" for name in _list_optimizers() if name.lower() == plain]
        short = plain.removesuffix("loss")
        similar += [f", nn.{name}()" for name in losses.__all__ if name.lower().removesuffix("loss") == short]
        if similar:
            return similar[0]
    if isfunction(value) and name == "loss":
        own = f"; {page_hint('custom-layer')} shows how to write one"
        return f"{own}; wrap a function of PyTorch in a torch.nn.Module with forward(output, target)"
    return ", one of fsdpx.nn or fsdpx.optim"


def _list_optimizers() -> list[str]:
    """Return the names of all optimizers in `fsdpx.optim`."""
    kinds = {name: getattr(optim, name) for name in dir(optim)}
    return [name for name, kind in kinds.items() if is_dataclass(kind) and hasattr(kind, "update")]


def suggest_for_torch_object(value: Any) -> str:
    """If `value` is a PyTorch optimizer or learning rate schedule (an instance or a class), return an error line that
    names the counterpart in fsdpx. For all other values, return ""."""
    kind = value if isinstance(value, type) else type(value)
    if not kind.__module__.startswith("torch.optim"):
        return ""
    if hasattr(value, "last_epoch") or "lr_scheduler" in kind.__module__:
        ours = [name for name in optim.schedules.__all__ if kind.__name__.lower().startswith(name.lower())]
        use = f"optim.schedules.{ours[0] if ours else 'Cosine'}(...)"
        return f"torch.optim.lr_scheduler.{kind.__name__}: a schedule is the rate itself, fsdpx.optim.AdamW(lr={use})"
    ours_too = getattr(optim, kind.__name__, None)
    if ours_too is None:
        return (
            f"torch.optim.{kind.__name__} is not in fsdpx: choose one of {', '.join(_list_optimizers())} of fsdpx.optim"
        )
    names = [field.name for field in fields(ours_too)]
    defaults = {field.name: field.default for field in fields(ours_too)}
    given = {name: one for name, one in getattr(value, "defaults", {}).items() if name in names}
    words = [f"{name}={one!r}" for name, one in given.items() if name == "lr" or one != defaults[name]]
    return f"torch.optim.{kind.__name__}: use fsdpx.optim.{kind.__name__}({', '.join(words)})"


def require_optimizer_supports_tensor_axis(optimizer: Any, tensor_size: int) -> None:
    """Raise ConfigError if the optimizer needs full parameters but the mesh has a tensor axis, which shards
    parameters."""
    if tensor_size > 1 and needs_full_parameters(optimizer):
        description = f"{type(optimizer).__name__} needs full parameters"
        raise ConfigError(f"{description}, the tensor axis of {tensor_size} ranks shards them; use optim.AdamW")
