"""The models that `show` takes by name, each with its loss and the shapes of its batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdpx import nn
from fsdpx.errors import ConfigError
from fsdpx.nn import models

__all__ = ["CATALOG", "Entry", "entry"]


@dataclass(frozen=True)
class Entry:
    """A model with what a step of it needs.

    about: one line that describes it. model: a function that makes it. x, y: functions from n to the (shape, dtype) of
    n samples. batch: the usual number of samples of the global batch."""

    about: str
    model: Callable[[], nn.Layer]
    loss: nn.Loss
    x: Callable[[int], Any]
    y: Callable[[int], Any]
    batch: int


def _text(size: str) -> Entry:
    s = models.SIZES[size]
    about = f"GPT, {s.n_layers} blocks of width {s.d_model}, {s.n_heads} heads, {s.seq_len} bytes of context"

    def tokens(n: int) -> tuple[tuple[int, int], str]:
        return (n, s.seq_len), "int64"

    return Entry(about, lambda: models.gpt(size), nn.CrossEntropy(), tokens, tokens, 16)


def _mlp(layers: int, width: int, batch: int, activation: bool, about: str) -> Entry:
    def rows(n: int) -> tuple[tuple[int, int], str]:
        return (n, width), "float32"

    return Entry(about, lambda: models.mlp(layers, width, activation), nn.MSE(), rows, rows, batch)


CATALOG: dict[str, Entry] = {
    "gpt-tiny": _text("tiny"),
    "gpt-small": _text("small"),
    "gpt-medium": _text("medium"),
    "mlp": _mlp(24, 1024, 256, True, "24 x Linear(1024, 1024) + GELU"),
    "many": _mlp(1000, 32, 64, False, "1,000 x Linear(32, 32)"),
    "digits": Entry(
        "a small convolutional network on drawn digits",
        models.digits,
        nn.CrossEntropy(),
        lambda n: ((n, 1, models.DIGIT_SIDE, models.DIGIT_SIDE), "float32"),
        lambda n: ((n,), "int64"),
        64,
    ),
}


def entry(name: str) -> Entry:
    if name not in CATALOG:
        raise ConfigError(f"no example {name!r}: choose one of {', '.join(CATALOG)}")
    return CATALOG[name]
