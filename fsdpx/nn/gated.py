"""Gated MLPs: SwiGLU and its kin."""

from __future__ import annotations

from typing import Any

from fsdpx.array import kernels
from fsdpx.errors import ConfigError
from fsdpx.nn.container import Composite
from fsdpx.nn.init import Init, zeros
from fsdpx.nn.layer import Array, Env, Layer, Params
from fsdpx.nn.linear import Linear
from fsdpx.nn.marks import Column, Row
from fsdpx.nn.shape import one_shape

__all__ = ["Gate", "GatedMLP"]

FORMS = {"silu": "silu", "gelu": "gelu", "gelu_new": "gelu tanh", "gelu_pytorch_tanh": "gelu tanh"}
"""The forms of the kernel by the names that configurations of models have for them."""


class Gate(Layer):
    """activation(a) b of two arrays of one shape; the result is not saved for backward but recomputed there.

    Parameters
    ----------
    activation : "silu" (SwiGLU), "gelu" (GEGLU), or "gelu_new" or "gelu_pytorch_tanh" for its tanh form
    """

    n_inputs = 2
    acts_on = "element"
    cheap = True

    def __init__(self, activation: str = "silu") -> None:
        if activation not in FORMS:
            raise ConfigError(f"Gate: activation must be one of {', '.join(FORMS)}, got {activation!r}")
        self.activation = activation
        self._form = FORMS[activation]
        form = "" if self._form == "silu" else f" {self._form}"
        self.runs = (f"gated{form}", f"gated_backward{form}")

    def forward(self, env: Env, p: Params, x: tuple[Array, Array]) -> tuple[Array, Any]:
        one_shape(self, x)
        return kernels.gated(env.xp, *x, self._form), tuple(x)

    def recompute(self, env: Env, p: Params, saved: Any) -> Array:
        return kernels.gated(env.xp, *saved, self._form)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        return kernels.gated_backward(env.xp, *saved, dy, self._form), ()


class GatedMLP(Composite):
    """down(activation(gate(x)) up(x)) (Shazeer 2020): `(samples, ..., d_model)` to the same, one unit.

    Parameters
    ----------
    d_model : features of the input and the result
    d_hidden : features between
    activation : as in `Gate`
    bias : whether the three Linear have biases
    init, out_init : of `gate.weight` and `up.weight`, and of `down.weight`; biases begin at 0
    """

    unit = True
    plan = {"gate": Column(), "up": Column(), "down": Row()}  # noqa: RUF012

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
        self.d_model, self.d_hidden, self.activation, self.bias = d_model, d_hidden, activation, bool(bias)
        self.gate = Linear(d_model, d_hidden, bias, init=init, bias_init=zeros)
        self.up = Linear(d_model, d_hidden, bias, init=init, bias_init=zeros)
        self.down = Linear(d_hidden, d_model, bias, init=out_init or init, bias_init=zeros)
        self.product = Gate(activation)

    def compose(self, x: Any) -> Any:
        return self.down(self.product(self.gate(x), self.up(x)))
