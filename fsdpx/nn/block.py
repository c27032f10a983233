"""The parts of a transformer: MLP and TransformerBlock, each one unit."""

from fsdpx.nn.activation import GELU
from fsdpx.nn.attention import MultiHeadAttention
from fsdpx.nn.check import positive
from fsdpx.nn.container import Container, Step
from fsdpx.nn.dropout import Dropout
from fsdpx.nn.init import Init, zeros
from fsdpx.nn.layer import Layer
from fsdpx.nn.linear import Linear
from fsdpx.nn.norm import LayerNorm
from fsdpx.nn.shape import Add

__all__ = ["MLP", "TransformerBlock"]


class MLP(Container):
    """down(activation(up(x))), then dropout: `(samples, ..., d_model)` to the same.

    d_hidden: the width between, 4 d_model if None. Parameters `up.*` and `down.*`, two Linear. `init` and
    `out_init` are those of their weights; with `init` the biases begin at 0.
    """

    unit = True

    def __init__(
        self,
        d_model: int,
        d_hidden: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        activation: Layer | None = None,
        *,
        init: Init | None = None,
        out_init: Init | None = None,
    ) -> None:
        positive(self, d_model=d_model)
        self.d_model = d_model
        self.d_hidden = d_hidden
        self.dropout = float(dropout)
        self.bias = bool(bias)
        self.activation = activation
        hidden = 4 * d_model if d_hidden is None else d_hidden
        bias_init = zeros if init else None
        layers = {
            "up": Linear(d_model, hidden, bias, init=init, bias_init=bias_init),
            "activation": activation or GELU(),
            "down": Linear(hidden, d_model, bias, init=out_init or init, bias_init=bias_init),
        }
        super().__init__(*_line(layers | ({"dropout": Dropout(dropout)} if dropout else {})))


class TransformerBlock(Container):
    """x + attn(norm1(x)), then x + mlp(norm2(x)): the pre-norm block of GPT-2 (Radford et al. 2019).

    `(samples, time, d_model)` to the same. dropout: on the attention weights and on both branches.
    """

    unit = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_hidden: int | None = None,
        causal: bool = True,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        init: Init | None = None,
        out_init: Init | None = None,
    ) -> None:
        self.d_model = d_model
        self.n_heads = n_heads
        self.d_hidden = d_hidden
        self.causal = bool(causal)
        self.dropout = float(dropout)
        self.bias = bool(bias)
        attention = MultiHeadAttention(d_model, n_heads, causal, dropout, bias, init=init, out_init=out_init or init)
        branch = {"norm1": LayerNorm(d_model, bias=bias), "attn": attention}
        branch |= {"dropout": Dropout(dropout)} if dropout else {}
        second: dict[str, Layer] = {
            "norm2": LayerNorm(d_model, bias=bias),
            "mlp": MLP(d_model, d_hidden, dropout, bias, init=init, out_init=out_init),
        }
        steps = [*_branch("add1", "x", branch), *_branch("add2", "add1", second)]
        super().__init__(steps, ("x",), ("add2",))


def _line(layers: dict[str, Layer], source: str = "x") -> tuple[list[Step], tuple[str], tuple[str]]:
    """Steps of `layers` one after the other, from the value `source`; its name; the last one's name."""
    steps, value = [], source
    for name, layer in layers.items():
        steps.append(Step(name, layer, (value,), (name,)))
        value = name
    return steps, (source,), (value,)


def _branch(name: str, source: str, layers: dict[str, Layer]) -> list[Step]:
    """`name = source + layers(source)`."""
    steps, _, (end,) = _line(layers, source)
    return [*steps, Step(name, Add(), (source, end), (name,))]
