"""The models that the commands `show`, `plan`, `bench` and `compile` accept: built-in examples and users' own models,
each with a loss and batch shapes."""

import pkgutil
import re
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

from fsdpx import nn
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.array.shapes import ShapeArray
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.examples import models
from fsdpx.ext.fields.grid import Grid
from fsdpx.nn.layer import list_kernels
from fsdpx.nn.layer_list import linearize
from fsdpx.nn.shape_inference import output_shapes

__all__ = ["CATALOG", "CatalogModel", "find_model", "list_kernels_of_model_and_loss"]

_INTEGER_INPUT_ERROR = "wants whole numbers"
"""Part of the error message of a layer that accepts only integer inputs, such as Embedding."""
_BATCH_PATTERN = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")


@dataclass(frozen=True)
class CatalogModel:
    """A model with everything that a training step needs.

    Attributes
    ----------
    about : one-line description of the model
    model : function that creates the model
    loss : the loss
    x, y : functions that take a number of samples n, and return the (shape, dtype) of n inputs (x) or n targets (y)
    batch : default size of the global batch in samples
    cells : number of cells along each dim of a field; () if samples are not fields
    """

    about: str
    model: Callable[[], nn.Layer]
    loss: nn.Loss
    x: Callable[[int], Any]
    y: Callable[[int], Any]
    batch: int
    cells: tuple[int, ...] = ()

    def with_field_shape(self, cells: tuple[int, ...], grid: Grid | None) -> "CatalogModel":
        """Return a copy of this entry for fields with the given number of cells along each dim. If `grid` is given,
        samples have the shape of this rank's shard of the field, with channels last."""
        if len(cells) != len(self.cells):
            raise ConfigError(f"--field {','.join(map(str, cells))}: this model takes fields of {len(self.cells)} dims")

        def adapt_batch(batch: Callable[[int], Any]) -> Callable[[int], Any]:
            def make_spec(n: int) -> Any:
                (_, channels, *_), dtype = batch(n)
                if grid is None:
                    return (n, channels, *cells), dtype
                return (n, *grid.parts.local_shape(grid.coords), channels), dtype

            return make_spec

        return replace(self, x=adapt_batch(self.x), y=adapt_batch(self.y), cells=cells)


def _make_gpt_entry(size: str) -> CatalogModel:
    s = models.SIZES[size]
    about = f"GPT, {s.n_layers} blocks of width {s.d_model}, {s.n_heads} heads, {s.seq_len} bytes of context"

    def make_tokens(n: int) -> tuple[tuple[int, int], str]:
        return (n, s.seq_len), "int64"

    return CatalogModel(about, lambda: models.make_gpt(size), nn.CrossEntropyLoss(), make_tokens, make_tokens, 16)


def _make_mlp_entry(layers: int, width: int, batch: int, activation: bool, about: str) -> CatalogModel:
    def make_rows(n: int) -> tuple[tuple[int, int], str]:
        return (n, width), "float32"

    return CatalogModel(
        about, lambda: models.make_mlp(layers, width, activation), nn.MSELoss(), make_rows, make_rows, batch
    )


def _make_field_model_entry(cells: tuple[int, ...], model: Callable[[], nn.Layer], about: str) -> CatalogModel:
    """Return the catalog entry of a model that maps three-channel fields to three-channel fields."""

    def make_fields(n: int) -> tuple[tuple[int, ...], str]:
        return (n, 3, *cells), "float32"

    return CatalogModel(about, model, nn.RelativeL2(), make_fields, make_fields, 1, cells)


CATALOG: dict[str, CatalogModel] = {
    "gpt-tiny": _make_gpt_entry("tiny"),
    "gpt-small": _make_gpt_entry("small"),
    "gpt-medium": _make_gpt_entry("medium"),
    "mlp": _make_mlp_entry(24, 1024, 256, True, "24 x Linear(1024, 1024) + GELU"),
    "many": _make_mlp_entry(1000, 32, 64, False, "1,000 x Linear(32, 32)"),
    "digits": CatalogModel(
        "a small convolutional network on drawn digits",
        models.make_digits_model,
        nn.CrossEntropyLoss(),
        lambda n: ((n, 1, models.DIGIT_SIDE, models.DIGIT_SIDE), "float32"),
        lambda n: ((n,), "int64"),
        64,
    ),
    "unet2d": _make_field_model_entry(
        (256, 256), lambda: nn.UNet(3, 3, 2, 16, 4), "a U-Net of 4 levels and 16 channels on 2-D fields"
    ),
    "unet3d": _make_field_model_entry(
        (64, 64, 64), lambda: nn.UNet(3, 3, 3, 8, 4), "a U-Net of 4 levels and 8 channels on 3-D fields"
    ),
    "fno2d": _make_field_model_entry(
        (256, 256), lambda: nn.FNO(3, 3, (24, 24), 32, 4), "an FNO of 4 blocks, 32 channels, 24 modes"
    ),
}


def find_model(name: str, batch: str | None = None) -> CatalogModel:
    """Return the catalog model `name`, or a user's model if `name` has the form "module:name". A user's model is a
    layer, a (layer, loss) pair, or a function that returns either of these.

    `batch` is the size of the global batch in samples or, for a user's model, the shape of the batch: for example
    "8x1024", or "8x1024:int64" with a dtype."""
    if ":" in name:
        return _make_user_model_entry(name, batch)
    if name not in CATALOG:
        raise ConfigError(
            f"no example {name!r}: choose one of {', '.join(CATALOG)}, or a function of your own, mymodule:make_model"
        )
    found = CATALOG[name]
    if batch is None:
        return found
    if not batch.isdecimal():
        raise ConfigError(f"--batch {batch}: samples of {name} have their own shape; give their number alone")
    return replace(found, batch=int(batch))


def _make_user_model_entry(name: str, batch: str | None) -> CatalogModel:
    """Return the catalog entry of a user's model at "module:name".

    If `batch` names no dtype, inputs are float32, or int64 if the model rejects float32. If the user gives no loss, the
    loss is CrossEntropyLoss for integer inputs and MSELoss otherwise."""
    model, loss = _import_user_model_and_loss(name)
    match = _BATCH_PATTERN.fullmatch(batch or "")
    if match is None:
        raise ConfigError(f"{name}: say the shape of a global batch, samples first: --batch 8x1024 or 8x1024:int64")
    dims = tuple(map(int, match[1].split("x")))
    dtype, output = _find_input_dtype_and_output_shape(model, dims, match[2])
    loss = loss or (nn.CrossEntropyLoss() if dtype.startswith("int") else nn.MSELoss())
    labels = isinstance(loss, nn.CrossEntropyLoss)
    target = output[1 : -1 if labels else None], "int64" if labels else "float32"
    about = f"{model.__class__.__name__}, samples of {'x'.join(map(str, dims[1:])) or 1} {dtype}, {loss!r}"
    cells = () if labels or dtype.startswith("int") or output[2:] != dims[2:] else dims[2:]
    x, y = lambda n: ((n, *dims[1:]), dtype), lambda n: ((n, *target[0]), target[1])
    return CatalogModel(about, lambda: model, loss, x, y, dims[0], cells)


def list_kernels_of_model_and_loss(name: str) -> list[str]:
    """Return the names of the kernels that a model and its loss run. For a user's model without a loss, the kernels of
    both CrossEntropyLoss and MSELoss are included."""
    if ":" in name:
        model, own = _import_user_model_and_loss(name)
        losses = [nn.CrossEntropyLoss(), nn.MSELoss()] if own is None else [own]
    else:
        found = find_model(name)
        model, losses = found.model(), [found.loss]
    return list(dict.fromkeys([*list_kernels(model), *(kernel for loss in losses for kernel in loss.kernel_names)]))


def _import_user_model_and_loss(name: str) -> tuple[nn.Layer, nn.Loss | None]:
    """Import a user's model from "module:name", and return (model, loss). The loss is None if the user gives none."""
    made = _import_and_call_factory(name)
    model, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Layer):
        raise ConfigError(f"{name}: a layer is needed, or a layer and its loss; it gave {type(model).__name__}")
    return model, loss


def _import_and_call_factory(name: str) -> Any:
    """Import the object at "module:name". If it is a function, call it without arguments and return the result."""
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = pkgutil.resolve_name(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the user's module exists, but imports a module that does not exist
        raise ConfigError(f"{name}: no module {module!r} in {Path.cwd()} or on the path of Python") from error
    except (AttributeError, ValueError) as error:
        raise ConfigError(f"{name}: module {module!r} has no {attribute!r}") from error
    if isinstance(found, nn.Layer) or not callable(found):
        return found
    try:
        signature(found).bind()
    except TypeError as error:
        raise ConfigError(f"{name}: {error}; name a function that needs no arguments") from None
    except ValueError:
        pass  # functions written in C may have no signature, so they are called without a check
    return found()


def _find_input_dtype_and_output_shape(
    model: nn.Layer, dims: tuple[int, ...], wanted: str | None
) -> tuple[str, tuple[int, ...]]:
    """Return an input dtype that the model accepts, and the shape of its output. Unless `wanted` is given, float32 is
    tried before int64."""
    misfits: list[ShapeError] = []
    for dtype in ("float32", "int64") if wanted is None else (wanted,):
        given = ShapeArray(dims, parse_dtype(dtype))
        try:
            outputs = output_shapes(linearize(model), [given])
        except ShapeError as error:
            misfits.append(error)
            continue
        if len(outputs) != 1:
            raise ConfigError("models of one output are shown; use fsdpx.dry_run for others")
        return dtype, tuple(outputs[0].shape)
    raise misfits[-1 if _INTEGER_INPUT_ERROR in str(misfits[0]) else 0]
