"""Linear: y = x W^T + b over the last dim."""

import math
from typing import Any

from fsdpx.nn.init import Init, uniform
from fsdpx.nn.layer import Array, Env, Layer, Params, Spec, positive, want_last
from fsdpx.nn.numeric import add_linear, affine, flat, linear_backward, product

__all__ = ["Linear"]


class Linear(Layer):
    """y = x weight^T + bias: `(samples, ..., in_features)` -> `(samples, ..., out_features)`.

    Parameters
    ----------
    in_features, out_features : size of the last dim of the input and of the result; `weight (out, in)`
    bias : whether there is a `bias (out_features,)`
    init : of `weight`; None: U(-k, k) with k = 1/sqrt(in_features), as in PyTorch
    bias_init : of `bias`; None: the same distribution
    """

    acts_on = "position"
    runs: tuple[str, ...] = ("linear",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init: Init | None = None,
        bias_init: Init | None = None,
    ) -> None:
        positive(self, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.bias = bool(bias)
        self.init, self.bias_init = init, bias_init

    def specs(self) -> dict[str, Spec]:
        default = uniform(1.0 / math.sqrt(self.in_features))
        specs = {"weight": Spec((self.out_features, self.in_features), self.init or default)}
        if self.bias:
            specs["bias"] = Spec((self.out_features,), self.bias_init or default)
        return specs

    def bare(self, env: Env, p: Params, x: Array) -> Array:
        """The product without the bias."""
        want_last(self, x, self.in_features)
        return affine(env.xp, flat(x), p["weight"], None).reshape(*x.shape[:-1], self.out_features)

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        bias = p["bias"] if self.bias else None
        if x.ndim == 2 and x.shape[1] == self.in_features:  # without reshapes, which a small layer feels
            return affine(env.xp, x, p["weight"], bias), (x,)
        want_last(self, x, self.in_features)
        return affine(env.xp, flat(x), p["weight"], bias).reshape(*x.shape[:-1], self.out_features), (x,)

    def backward(self, env: Env, p: Params, g: Params, saved: Any, dy: Array) -> Array:
        (x,) = saved
        if x.ndim == 2:
            return linear_backward(env.xp, g, p["weight"], dy, x)
        return linear_backward(env.xp, g, p["weight"], flat(dy), flat(x)).reshape(x.shape)

    def backward_leaf(self, env: Env, p: Params, g: Params, saved: Any, dy: Array) -> None:
        self.backward_params(env, g, (*saved, dy))

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        (x,) = saved
        dx = product(env.xp, flat(dy), p["weight"])
        return dx if x.ndim == 2 else dx.reshape(x.shape), (x, dy)

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        x, dy = kept
        add_linear(env.xp, g, flat(dy), flat(x))
