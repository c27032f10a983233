"""`ModelBuilder` builds a trainer and its data loaders from a table of plain values, such as a run file in TOML."""

from __future__ import annotations

import pkgutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from os import PathLike
from typing import Any

import numpy as np

from fsdpx import data, nn, optim
from fsdpx.core import compression as codecs
from fsdpx.core.base import config
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.environment import SWITCHES
from fsdpx.core.base.name_hints import did_you_mean, require_known_options
from fsdpx.core.base.safe_files import expanduser, read_file
from fsdpx.core.comm import mesh
from fsdpx.core.trainer.distribute import OPTIONS, distribute
from fsdpx.core.trainer.recipe import adapt_foreign_model_and_loss
from fsdpx.core.trainer.trainer import Trainer
from fsdpx.data.loader import DataLoader
from fsdpx.errors import ConfigError
from fsdpx.examples import models
from fsdpx.ext import asynchronous
from fsdpx.ext.compression import int8, powersgd, topk
from fsdpx.ext.observe import trace
from fsdpx.ext.offload import choice
from fsdpx.optim import schedules

__all__ = ["SECTIONS", "ModelBuilder"]

SECTIONS = ("model", "loss", "optimizer", "distribute", "data", "validation", "loader", "fit")
REQUIRED = ("model", "loss", "optimizer")
PLAIN = str | bytes | int | float | list | tuple | None
"""Types of plain values. A section must be a table (dict) or a finished object, such as a layer; a plain value is an
error. The only exceptions are data sections, which may also be lists or tuples."""
NAME_SOURCES: tuple[Any, ...] = (
    nn, models, optim, schedules, data, codecs, int8, topk, powersgd, config, choice, mesh, asynchronous, trace,
)  # fmt: skip


@dataclass(frozen=True)
class ModelBuilder:
    """Builds the model, trainer and data loaders of a training run that is described by a run file or a dict.

    A table with `make` is a call: `{make = "Linear", args = [8, 3], bias = false}` is `nn.Linear(8, 3, bias=False)`. A
    table with `use` stands for the named object itself: `{use = "no_decay"}`. Names are looked up in `fsdpx.nn`,
    `fsdpx.optim`, its schedules, `fsdpx.data` and the classes for arguments of `distribute` (`Mesh`, `PowerSGD`, ...).
    Refer to your own objects as `module:name`. Invalid values raise a ConfigError that names the section and key.

    Parameters
    ----------
    plan : dict from section name to the values of the section. The sections model, loss and optimizer are required;
        distribute, data, validation, loader and fit are optional. Model, loss, optimizer and data sets may also be
        objects, such as `nn.CrossEntropyLoss()`; model and loss may be PyTorch modules
    source : where `plan` comes from, such as the path of the run file, for error messages
    """

    plan: Mapping[str, Any]
    source: str = "plan"

    def __post_init__(self) -> None:
        for name in self.plan:
            if name not in SECTIONS:
                raise ConfigError(f"{self.source}: there is no section [{name}]{did_you_mean(name, SECTIONS)}")
        for name in REQUIRED:
            if name not in self.plan:
                raise ConfigError(f"{self.source}: the section [{name}] is missing")

    @classmethod
    def from_file(cls, path: str | PathLike[str], changes: Sequence[str] = ()) -> ModelBuilder:
        """Read a run file, and return its builder.

        Parameters
        ----------
        path : path of the run file in TOML
        changes : overrides of the form `section.key=value`, each of which replaces a value in the file (default: none)

        Returns
        -------
        ModelBuilder : its `source` is the path

        Raises
        ------
        ConfigError : the file cannot be read or is not TOML, an override is malformed, or a section is unknown or
            missing
        """
        try:
            plan = tomllib.loads(read_file(expanduser(path), ours=False).decode())
        except OSError as error:
            raise ConfigError(f"{path}: no run file can be read there: {error.strerror or error}") from error
        except ValueError as error:
            raise ConfigError(f"{path}: this is not TOML: {error}") from error
        for change in changes:
            _apply_text_override(plan, change)
        return cls(plan, str(path))

    def make_model(self) -> nn.Layer:
        """Build the model that [model] describes; a PyTorch module is wrapped as a layer."""
        found: nn.Layer = adapt_foreign_model_and_loss(self._make_section_object("model"), None)[0]
        return found

    def build_trainer(self, comm: Any = None) -> Trainer:
        """Build the model, and return the trainer that `distribute(model, loss=..., optimizer=..., **options)` returns
        for the options in [distribute]. Collective.

        Parameters
        ----------
        comm : communicator of all ranks of the job, as for `distribute` (default: the one that `fsdpx.init` opens)

        Returns
        -------
        Trainer : the trainer of this rank

        Raises
        ------
        ConfigError : a section names an unknown function or argument, or `distribute` rejects an option
        """
        options = self._build_objects_of_section("distribute")
        if isinstance(options.get("mesh"), str):
            options["mesh"] = mesh.Mesh.parse(options["mesh"])
        options = {
            "loss": self._make_section_object("loss"),
            "optimizer": self._make_section_object("optimizer"),
            "comm": comm,
            **options,
        }
        if options.get("strategy") == "auto" and "data" in self.plan:
            options.setdefault("batch", self._infer_batch_shapes_and_dtypes())
        model = self.make_model()
        self._require_accepted_arguments(distribute, [model], options, "distribute")
        return distribute(model, **options)

    def _infer_batch_shapes_and_dtypes(self) -> Any:
        """Return a (shape, dtype) pair for the inputs of a global batch and one for its targets, derived from
        batch_size and the first sample of [data]. Return None if [loader] has no batch_size."""
        rows = self._build_objects_of_section("loader").get("batch_size")
        x, y, *_ = map(np.asarray, self._make_section_object("data")[0])
        return None if rows is None else tuple(((rows, *one.shape), str(one.dtype)) for one in (x, y))

    def make_loaders(self, trainer: Trainer) -> tuple[DataLoader, DataLoader | None]:
        """Return the data loader for training, described by [data] and [loader], and the data loader for validation,
        described by [validation].

        Both split each batch over the ranks of `trainer.data_group`. Unless [loader] says otherwise, training batches
        are shuffled and a short last batch is dropped. Validation batches are always in order.

        Parameters
        ----------
        trainer : the trainer that gets the batches

        Returns
        -------
        tuple : (training loader, validation loader); the validation loader is None if there is no [validation]

        Raises
        ------
        ConfigError : there is no [data], or an option of [loader] is unknown
        """
        if "data" not in self.plan:
            raise ConfigError(f"{self.source}: the section [data] is missing")
        options = {
            "comm": trainer.data_group,
            "reproducible_chunks": self.plan.get("distribute", {}).get("reproducible_chunks"),
        }
        options |= self._build_objects_of_section("loader")
        self._require_accepted_arguments(DataLoader, [None], options, "loader")
        train = DataLoader(self._make_section_object("data"), **{"shuffle": True, "drop_last": True, **options})
        if "validation" not in self.plan:
            return train, None
        return train, DataLoader(self._make_section_object("validation"), **{**options, "shuffle": False})

    def get_fit_options(self) -> dict[str, Any]:
        """Return the options in [fit] as keyword arguments of `trainer.fit`."""
        return self._build_objects_of_section("fit")

    def _make_section_object(self, section: str) -> Any:
        """Return the object that a section describes: the result of its `make` call. If the plan contains an object
        instead of a table for the section, return this object."""
        given = self.plan[section]
        if not isinstance(given, Mapping | PLAIN) or (section not in REQUIRED and isinstance(given, list | tuple)):
            # `given` is an object, not a table; no check is needed here, because `distribute` or `DataLoader` checks it
            return given
        if not isinstance(given, Mapping) or "make" not in given:
            raise ConfigError(f'{self.source}: [{section}] says nothing to make: make = "Name"')
        return self._replace_make_and_use_tables(given, section)

    def _build_objects_of_section(self, section: str) -> dict[str, Any]:
        """Return a section as a dict in which each nested `make` or `use` table is replaced by the object that it
        describes."""
        given = self.plan.get(section, {})
        if not isinstance(given, Mapping):
            raise ConfigError(f"{self.source}: {section} is a section: write [{section}] and its values below")
        return {name: self._replace_make_and_use_tables(value, f"{section}.{name}") for name, value in given.items()}

    def _replace_make_and_use_tables(self, value: Any, where: str) -> Any:
        """Return `value` with each nested `make` table replaced by the result of the call that it describes, and each
        nested `use` table replaced by the object that it names. `where` is the location of the value, for error
        messages."""
        if type(value) in (list, tuple):
            return type(value)([self._replace_make_and_use_tables(one, f"{where}[{n}]") for n, one in enumerate(value)])
        if not isinstance(value, Mapping):
            return value
        if "use" in value:
            if more := [name for name in value if name != "use"]:
                raise ConfigError(f'{self.source}: [{where}] {more[0]}: use takes nothing; make = "Name" is a call')
            return self._resolve_object_name(value["use"], where)
        inner = {
            name: self._replace_make_and_use_tables(one, f"{where}.{name}")
            for name, one in value.items()
            if name != "make"
        }
        if "make" not in value:
            return inner
        function, args = self._resolve_object_name(value["make"], where), inner.pop("args", [])
        if not callable(function):
            raise ConfigError(f'{self.source}: [{where}] {value["make"]} is no function: use = "{value["make"]}"')
        if not isinstance(args, list | tuple):
            raise ConfigError(f"{self.source}: [{where}] args = {args!r}: a list is needed, args = [{args!r}]")
        self._require_accepted_arguments(function, args, inner, where)
        return function(*args, **inner)

    def _resolve_object_name(self, name: Any, where: str) -> Any:
        """Look up an object by its name in the modules of `NAME_SOURCES`, or import it if the name is `module:name`.
        Raise ConfigError if there is no such object."""
        if not isinstance(name, str):
            raise ConfigError(f"{self.source}: [{where}] {name!r} is no name")
        if ":" in name:
            try:
                return pkgutil.resolve_name(name)
            except (ImportError, AttributeError, ValueError) as error:
                raise ConfigError(f"{self.source}: [{where}] {name}: {error}") from error
        known = {one: home for home in reversed(NAME_SOURCES) for one in home.__all__}
        if name not in known:
            hint = did_you_mean(name, known) or "; names of your own are written module:name"
            raise ConfigError(f"{self.source}: [{where}] there is no {name!r} in fsdpx{hint}")
        return getattr(known[name], name)

    def _require_accepted_arguments(
        self, function: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any], where: str
    ) -> None:
        """Raise ConfigError unless `function` accepts these arguments."""
        try:
            taken = signature(function)
        except ValueError:  # some functions written in C have no signature, so their arguments cannot be checked
            return
        known = OPTIONS if function is distribute else taken.parameters
        if function is distribute or all(p.kind is not p.VAR_KEYWORD for p in taken.parameters.values()):
            require_known_options(f"{self.source}: [{where}] {function.__name__}", named, known)
        try:
            taken.bind(*args, **named)
        except TypeError as error:
            raise ConfigError(f"{self.source}: [{where}] {function.__name__}: {error}") from error


def _apply_text_override(plan: dict[str, Any], change: str) -> None:
    """Apply an override `section.key=value` to the plan, in place.

    A value that is not valid TOML counts as a Boolean if it is another spelling of true or false (tie=False, tie=no),
    and as a string otherwise (strategy=ddp)."""
    path, equals, text = change.partition("=")
    *tables, key = path.strip().split(".")
    if not equals or not key or not tables:
        raise ConfigError(f"{change!r}: a change is written section.key=value, such as fit.steps=20")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = SWITCHES.get(text.strip().lower(), text)
    for table in tables:
        plan = plan.setdefault(table, {})
        if not isinstance(plan, dict):
            raise ConfigError(f"{change!r}: {table} is a value, not a table")
    plan[key] = value
