"""Linear: y = x W^T + b over the last dim."""

import math
from collections.abc import Mapping
from typing import Any

from fsdpx.nn.check import positive, want_last
from fsdpx.nn.init import Init, uniform
from fsdpx.nn.layer import Array, Env, Layer, Spec
from fsdpx.nn.numeric import add_product, add_sum, product

__all__ = ["Linear"]


class Linear(Layer):
    """`(samples, ..., in_features)` -> `(samples, ..., out_features)`.

    Parameters `weight (out_features, in_features)` and `bias (out_features,)`, both from U(-k, k),
    k = 1/sqrt(in_features), as in PyTorch; `init` and `bias_init` replace that.
    """

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
        self.in_features = in_features
        self.out_features = out_features
        self.bias = bool(bias)
        self.init = init
        self.bias_init = bias_init

    def specs(self) -> dict[str, Spec]:
        default = uniform(1.0 / math.sqrt(self.in_features))
        specs = {"weight": Spec((self.out_features, self.in_features), self.init or default)}
        if self.bias:
            specs["bias"] = Spec((self.out_features,), self.bias_init or default)
        return specs

    def forward(self, env: Env, p: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        want_last(self, x, self.in_features)
        # One flat product: a stack of matrices would be one BLAS call per sample.
        y = product(env.xp, x.reshape(-1, self.in_features), p["weight"].T)
        if self.bias:
            y += p["bias"]
        return y.reshape(*x.shape[:-1], self.out_features), (x,)

    def backward_input(self, env: Env, p: Mapping[str, Array], saved: Any, dy: Array) -> tuple[Array, Any]:
        (x,) = saved
        dx = product(env.xp, dy.reshape(-1, self.out_features), p["weight"])
        return dx.reshape(x.shape), (x, dy)

    def backward_params(self, env: Env, g: Mapping[str, Array], kept: Any) -> None:
        x, dy = kept
        rows = dy.reshape(-1, self.out_features)
        if "weight" in g:
            add_product(env.xp, g["weight"], rows.T, x.reshape(-1, self.in_features))
        if "bias" in g:
            add_sum(env.xp, g["bias"], rows, 0)
