"""The building blocks of a transformer: MLP, GatedMLP and TransformerBlock."""

from __future__ import annotations

from typing import Any

from fsdpx.core.array import kernels
from fsdpx.errors import ConfigError
from fsdpx.nn.activation import GELU, Dropout, make_activation
from fsdpx.nn.attention_layer import MultiHeadAttention
from fsdpx.nn.container import ChildCall, Composite, Container, make_steps_of_chain
from fsdpx.nn.gradient_accumulation import as_rows
from fsdpx.nn.init import Init, zeros
from fsdpx.nn.layer import Array, Layer, LayerContext, Params, require_positive, store_init_args
from fsdpx.nn.linear import Linear
from fsdpx.nn.norm import LayerNorm
from fsdpx.nn.shape import Add, require_equal_shapes
from fsdpx.nn.shard_specs import ColumnParallel, RowParallel

__all__ = ["MLP", "GatedActivation", "GatedMLP", "TransformerBlock"]

GATED_FORMS = {"silu": "silu", "gelu": "gelu", "gelu_new": "gelu tanh", "gelu_pytorch_tanh": "gelu tanh"}
"""Names of the variants of the gated-activation kernel, keyed by the names of activations in model configurations."""


class GatedActivation(Layer):
    """Gated activation of two inputs a and b of equal shape: `activation(a) * b`. The result is not saved, but
    recomputed in the backward pass.

    Parameters
    ----------
    activation : "silu" (SwiGLU), "gelu" (GEGLU), or "gelu_new" or "gelu_pytorch_tanh" for the tanh form of GELU
    """

    n_inputs = 2
    acts_on = "element"
    cheap = True

    def __init__(self, activation: str = "silu") -> None:
        if activation not in GATED_FORMS:
            raise ConfigError(
                f"GatedActivation: activation must be one of {', '.join(GATED_FORMS)}, got {activation!r}"
            )
        self.activation = activation
        self._form = GATED_FORMS[activation]
        form = "" if self._form == "silu" else f" {self._form}"
        self.kernel_names = (f"gated{form}", f"gated_backward{form}")

    def forward(self, env: LayerContext, p: Params, x: tuple[Array, Array]) -> tuple[Array, Any]:
        require_equal_shapes(self, x)
        return kernels.gated(env.xp, *x, self._form), tuple(x)

    def recompute(self, env: LayerContext, p: Params, saved: Any) -> Array:
        return kernels.gated(env.xp, *saved, self._form)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        return kernels.gated_backward(env.xp, *saved, dy, self._form), ()


class GatedMLP(Composite):
    """Gated feed-forward layer (Shazeer 2020): `down(activation(gate(x)) * up(x))`. Input and output have the shape
    `(samples, ..., d_model)`. The layer is one FSDP unit: its parameters are all-gathered together.

    Parameters
    ----------
    d_model : number of features of the input and the output
    d_hidden : number of hidden features
    activation : as in `GatedActivation`
    bias : whether the three Linear layers have biases, which are initialized to 0
    init, out_init : initializer of `gate.weight` and `up.weight`, and initializer of `down.weight`
    """

    unit = True
    plan = {"gate": ColumnParallel(), "up": ColumnParallel(), "down": RowParallel()}  # noqa: RUF012

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        activation: str = "silu",
        bias: bool = False,
        *,
        init: Init | None = None,
        out_init: Init | None = None,
    ) -> None:
        store_init_args(self, locals())
        self.gate = Linear(d_model, d_hidden, bias, init=init, bias_init=zeros)
        self.up = Linear(d_model, d_hidden, bias, init=init, bias_init=zeros)
        self.down = Linear(d_hidden, d_model, bias, init=out_init or init, bias_init=zeros)
        self.product = GatedActivation(activation)

    def compose(self, x: Any) -> Any:
        return self.down(self.product(self.gate(x), self.up(x)))


class MLP(Container):
    """Feed-forward layer: `down(activation(up(x)))`, followed by dropout. Input and output have the shape
    `(samples, ..., d_model)`.

    The parameters are `up.*` and `down.*`, from the two Linear layers. The result of a GELU is not saved, but
    recomputed in the backward pass.

    Parameters
    ----------
    d_model : number of features of the input and the output
    d_hidden : number of features between the two Linear layers; if None, 4 * d_model
    dropout : probability that an element of the result is dropped
    bias : whether the two Linear layers have biases
    activation : the activation layer; if None, `GELU()`
    init : initializer of `up.weight`; if given, biases are initialized to 0
    out_init : initializer of `down.weight`; if None, `init`
    """

    unit = fixed = True
    plan = {"up": ColumnParallel(), "down": RowParallel()}  # noqa: RUF012

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
        require_positive(self, d_model=d_model)
        store_init_args(self, locals())
        hidden = 4 * d_model if d_hidden is None else d_hidden
        bias_init = zeros if init else None
        layers = {
            "up": Linear(d_model, hidden, bias, init=init, bias_init=bias_init),
            "activation": activation or GELU(),
            "down": Linear(hidden, d_model, bias, init=out_init or init, bias_init=bias_init),
        }
        if isinstance(layers["activation"], GELU):
            form = layers["activation"].approximate
            self.kernel_names = tuple(
                name if form == "none" else f"{name} {form}" for name in ("bias_gelu", "recompute_gelu_and_backward")
            )
        super().__init__(*make_steps_of_chain(layers | ({"dropout": Dropout(dropout)} if dropout else {})))

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        up, gelu, down = self._get_up_activation_down()
        if not isinstance(gelu, GELU):
            return super().forward(env, p, x)
        parts = self._group_arrays_by_child(p)
        h = up.forward_without_bias(env, parts["up"], x)
        a = kernels.bias_gelu(env.xp, as_rows(h), parts["up"].get("bias"), gelu.approximate)
        y, _ = down.forward(env, parts["down"], a.reshape(h.shape))
        mask: tuple[Array, ...] = ()
        for step in self.steps[3:]:
            y, mask = step.layer.forward(env.child(step.name), {}, y)
        return y, ((x,), h, mask)

    def backward(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> Array:
        up, gelu, _ = self._get_up_activation_down()
        if not isinstance(gelu, GELU):
            return super().backward(env, p, g, saved, dy)
        parts, into = self._group_arrays_by_child(p), self._group_arrays_by_child(g)
        dh = self._backward_to_up(env, parts, into, saved, dy)
        return up.backward(env, parts["up"], into.get("up", {}), saved[0], dh)

    def backward_leaf(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> None:
        up, gelu, _ = self._get_up_activation_down()
        if not isinstance(gelu, GELU):
            super().backward_leaf(env, p, g, saved, dy)
            return
        parts, into = self._group_arrays_by_child(p), self._group_arrays_by_child(g)
        dh = self._backward_to_up(env, parts, into, saved, dy)
        if "up" in into:
            up.backward_leaf(env, parts["up"], into["up"], saved[0], dh)

    def _backward_to_up(self, env: LayerContext, parts: Params, into: Params, saved: Any, dy: Array) -> Array:
        """Run the backward pass from the result of the MLP to the output of `up`. Return the gradient of that output,
        and add the parameter gradients of `down` to `into`, which is grouped by child layer."""
        dh, kept_down = self._compute_gelu_input_gradient(env, parts["down"], saved, dy)
        if "down" in into:
            self._get_up_activation_down()[2].backward_params(env, into["down"], kept_down)
        return dh

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        up, gelu, _ = self._get_up_activation_down()
        if not isinstance(gelu, GELU):
            return super().backward_input(env, p, saved, dy)
        parts, held = self._group_arrays_by_child(p), saved[0]
        dh, kept_down = self._compute_gelu_input_gradient(env, parts["down"], saved, dy)
        dx, kept_up = up.backward_input(env, parts["up"], held, dh)
        return dx, {"up": kept_up, "down": kept_down}

    def _get_up_activation_down(self) -> tuple[Any, Layer, Layer]:
        """Return the three layers: up (a Linear or ColumnParallelLinear), activation, and down."""
        up, activation, down = (step.layer for step in self.steps[:3])
        return up, activation, down

    def _compute_gelu_input_gradient(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        """Return the gradient of the GELU's input, and the values that the layer `down` needs when its
        `backward_params` is called."""
        _, gelu, down = self._get_up_activation_down()
        assert isinstance(gelu, GELU)
        _, h, mask = saved
        for step in self.steps[3:]:
            dy, _ = step.layer.backward_input(env.child(step.name), {}, mask, dy)
        dh, kept = down.backward_input(env, p, (h,), dy)  # dh is a new array, so the kernel may change it in place
        a = kernels.recompute_gelu_and_backward(env.xp, h, dh, gelu.approximate)
        # `down` needs its input `a`, which was just recomputed; `kept` contains `h` in its place
        return dh, (a, *kept[1:])


class TransformerBlock(Container):
    """Pre-norm transformer block of GPT-2 (Radford et al. 2019): `x = x + attn(norm1(x))`, then
    `x = x + mlp(norm2(x))`.

    Input and output have the shape `(samples, time, d_model)`. The block is one FSDP unit: its parameters are
    all-gathered together.

    Parameters
    ----------
    d_model, n_heads, causal : as in `MultiHeadAttention`
    d_hidden : number of hidden features of the MLP; if None, 4 * d_model
    dropout : dropout probability of the attention weights and of the results of both branches
    bias : whether the Linear and LayerNorm layers have biases
    activation : name of the activation of the MLP, such as "gelu" or "gelu_new" (the tanh form of GELU)
    eps : `eps` of the LayerNorm layers
    init : initializer of all weights
    out_init : initializer of the weights of the last Linear of each branch; if None, `init`
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
        activation: str = "gelu",
        eps: float = 1e-5,
        init: Init | None = None,
        out_init: Init | None = None,
    ) -> None:
        store_init_args(self, locals())
        attention = MultiHeadAttention(d_model, n_heads, causal, dropout, bias, init=init, out_init=out_init or init)
        branch = {"norm1": LayerNorm(d_model, eps, bias=bias), "attn": attention}
        branch |= {"dropout": Dropout(dropout)} if dropout else {}
        second: dict[str, Layer] = {
            "norm2": LayerNorm(d_model, eps, bias=bias),
            "mlp": MLP(
                d_model, d_hidden, dropout, bias, make_activation(self, activation), init=init, out_init=out_init
            ),
        }
        steps = [*_make_residual_branch("add1", "x", branch), *_make_residual_branch("add2", "add1", second)]
        super().__init__(steps, ("x",), ("add2",))


def _make_residual_branch(name: str, source: str, layers: dict[str, Layer]) -> list[ChildCall]:
    """Return the container steps of a residual branch: they run `layers` in order on the value `source`, add `source`
    to the result, and store the sum as the value `name`."""
    steps, _, (end,) = make_steps_of_chain(layers, source)
    return [*steps, ChildCall(name, Add(), (source, end), (name,))]
