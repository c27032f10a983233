"""Models of fixed sizes, by name, for the examples and the commands `show` and `bench`."""

from dataclasses import dataclass

from fsdpx.nn.activation import GELU, ReLU
from fsdpx.nn.container import Sequential
from fsdpx.nn.gpt import GPT
from fsdpx.nn.layer import Layer
from fsdpx.nn.linear import Linear
from fsdpx.nn.norm import BatchNorm
from fsdpx.nn.shape import Flatten

__all__ = ["BYTES", "DIGIT_SIDE", "SIZES", "GPTSize", "make_digits_model", "make_gpt", "make_mlp"]

BYTES = 256
"""Vocabulary size of `make_gpt`: each token is a byte."""
DIGIT_SIDE = 12
"""Height and width in pixels of the images of the `digits` example."""


@dataclass(frozen=True)
class GPTSize:
    """Size of a GPT: width (number of features), number of blocks, number of heads per block, and context length in
    tokens."""

    d_model: int
    n_layers: int
    n_heads: int
    seq_len: int


SIZES = {"tiny": GPTSize(256, 4, 4, 256), "small": GPTSize(512, 8, 8, 256), "medium": GPTSize(1024, 16, 16, 512)}


def make_gpt(size: str, dropout: float = 0.0) -> GPT:
    """Build a byte-level GPT with tied weights. `size` is a key of `SIZES`, such as "tiny"."""
    s = SIZES[size]
    return GPT(BYTES, s.d_model, s.n_layers, s.n_heads, s.seq_len, tie=True, dropout=dropout)


def make_mlp(layers: int, width: int, activation: bool = True) -> Sequential:
    """Build an MLP of `layers` square Linear layers, each followed by a GELU if `activation` is true."""
    pair: list[Layer] = [Linear(width, width), *([GELU()] if activation else [])]
    return Sequential(*pair * layers)


def make_digits_model() -> Sequential:
    """Build a small convolutional network that maps images `(samples, 1, 12, 12)` to logits of the ten digits
    `(samples, 10)`."""
    from fsdpx.ext.fields.conv import Conv2d  # imported here, because the other models do not need field layers
    from fsdpx.ext.fields.pool import MaxPool2d

    return Sequential(
        Conv2d(1, 16, 3, padding=1), BatchNorm(16), ReLU(), MaxPool2d(2),
        Conv2d(16, 32, 3, padding=1), ReLU(), MaxPool2d(2), Flatten(),
        Linear(32 * 9, 64), ReLU(), Linear(64, 10),
    )  # fmt: skip
