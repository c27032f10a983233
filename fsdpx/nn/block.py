"""The parts of a transformer: MLP and TransformerBlock, each one unit."""

from collections.abc import Mapping
from typing import Any

from fsdpx.array import kernels
from fsdpx.nn.activation import GELU
from fsdpx.nn.attention import MultiHeadAttention
from fsdpx.nn.check import positive, want_last
from fsdpx.nn.container import Container, Step
from fsdpx.nn.dropout import Dropout
from fsdpx.nn.init import Init, zeros
from fsdpx.nn.layer import Array, Env, Layer
from fsdpx.nn.linear import Linear
from fsdpx.nn.norm import LayerNorm
from fsdpx.nn.numeric import flat, product
from fsdpx.nn.shape import Add

__all__ = ["MLP", "TransformerBlock"]


class MLP(Container):
    """down(activation(up(x))), then dropout: `(samples, ..., d_model)` to the same.

    d_hidden: the width between, 4 d_model if None. Parameters `up.*` and `down.*`, two Linear. `init` and
    `out_init` are those of their weights; with `init` the biases begin at 0.

    The result of a GELU is not kept for backward: the pass that differentiates it makes it again.
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
        self._dropout = Dropout(dropout)
        if isinstance(layers["activation"], GELU):
            form = layers["activation"].approximate
            self.runs = tuple(name if form == "none" else f"{name} {form}" for name in ("bias_gelu", "gelu_again"))
        super().__init__(*_line(layers | ({"dropout": self._dropout} if dropout else {})))

    def forward(self, env: Env, p: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        up, gelu, down = (step.layer for step in self.steps[:3])
        if not isinstance(gelu, GELU):
            return super().forward(env, p, x)
        assert isinstance(up, Linear)
        want_last(up, x, up.in_features)
        parts, shape = self._parts(p), (*x.shape[:-1], up.out_features)
        h = product(env.xp, flat(x), parts["up"]["weight"].T)
        a = kernels.bias_gelu(env.xp, h, parts["up"].get("bias"), gelu.approximate)
        y, _ = down.forward(env, parts["down"], a.reshape(shape))
        y, mask = self._dropout.forward(env.at("dropout"), {}, y)
        return y, ((x,), h.reshape(shape), mask)

    def backward(self, env: Env, p: Mapping[str, Array], g: Mapping[str, Array], saved: Any, dy: Array) -> Array:
        up, gelu, down = (step.layer for step in self.steps[:3])
        if not isinstance(gelu, GELU):
            return super().backward(env, p, g, saved, dy)
        parts, into = self._parts(p), self._parts(g)
        a, dh, dy = self._through_gelu(env, parts["down"], saved, dy)
        if "down" in into:
            down.backward_params(env, into["down"], (a, dy))
        del a
        return up.backward(env, parts["up"], into.get("up", {}), saved[0], dh)

    def backward_input(self, env: Env, p: Mapping[str, Array], saved: Any, dy: Array) -> tuple[Array, Any]:
        up, gelu, _ = (step.layer for step in self.steps[:3])
        if not isinstance(gelu, GELU):
            return super().backward_input(env, p, saved, dy)
        parts, held = self._parts(p), saved[0]
        a, dh, dy = self._through_gelu(env, parts["down"], saved, dy)
        dx, kept = up.backward_input(env, parts["up"], held, dh)
        return dx, (kept, (), (a, dy), ())[: len(self.steps)]

    def _through_gelu(self, env: Env, p: Mapping[str, Array], saved: Any, dy: Array) -> tuple[Array, Array, Array]:
        """The result of the GELU, the gradient of its input, and that of the result of `down`."""
        _, gelu, down = (step.layer for step in self.steps[:3])
        assert isinstance(gelu, GELU)
        _, h, mask = saved
        dy, _ = self._dropout.backward_input(env.at("dropout"), {}, mask, dy)
        dh, _ = down.backward_input(env, p, (h,), dy)  # a new array: it may be changed
        return kernels.gelu_again(env.xp, h, dh, gelu.approximate), dh, dy


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
