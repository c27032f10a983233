"""Linear layers cut over the tensor axis: by columns of the product, and by rows of what is summed.

The pair of Megatron-LM (Shoeybi et al. 2019): between a ColumnLinear and the RowLinear that closes it, activations are
cut along the features and nothing is communicated. With `sequence`, activations outside the pair are cut along dim 1
(Korthikanti et al. 2022). Bytes that one rank sends, n = bytes of the activation outside, N = width of the axis:

                              forward          backward
    ColumnLinear              0                2n(N-1)/N
    RowLinear                 2n(N-1)/N        0
    ColumnLinear, sequence     n(N-1)/N         n(N-1)/N, and n(N-1)/N to put its input together again
    RowLinear, sequence        n(N-1)/N         n(N-1)/N
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.nn import moves
from fsdpx.nn.check import positive, want_last
from fsdpx.nn.cut import Cut
from fsdpx.nn.init import Init
from fsdpx.nn.layer import Array, Env, Layer, Spec
from fsdpx.nn.linear import Linear
from fsdpx.nn.numeric import add_linear, add_product, add_sum, affine, flat, linear_backward, product

__all__ = ["ColumnLinear", "RowLinear", "named"]

Params = Mapping[str, Array]


class ColumnLinear(Layer):
    """`Linear` whose results are cut: `(samples, ..., in_features)` -> this rank's part of `out_features`.

    Parameters as `Linear` has them and begins them; `weight` and `bias` are cut along dim 0, in `blocks` and `grain`
    as `Cut` says. gather_output: the result is put together, whole on every rank. sequence: the input is cut along
    dim 1; it is put together for the product, and again in backward instead of being kept. Backward sums the gradient
    of the input over the axis while that of the weight is computed.
    """

    runs = ("linear",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = False,
        sequence: bool = False,
        blocks: int = 1,
        grain: int = 1,
        *,
        init: Init | None = None,
        bias_init: Init | None = None,
    ) -> None:
        positive(self, blocks=blocks, grain=grain)
        self._linear = Linear(in_features, out_features, bias, init=init, bias_init=bias_init)
        self.in_features = in_features
        self.out_features = out_features
        self.bias = bool(bias)
        self.gather_output = bool(gather_output)
        self.sequence = bool(sequence)
        self.blocks = blocks
        self.grain = grain
        self.init = init
        self.bias_init = bias_init
        self._cut = Cut(0, blocks, grain)
        self._cut.grains((out_features,))
        if gather_output and (blocks, grain) != (1, 1):
            raise ConfigError(f"{self!r}: gather_output works for blocks=1 and grain=1 only")

    def specs(self) -> dict[str, Spec]:
        return {name: replace(spec, cut=self._cut) for name, spec in self._linear.specs().items()}

    def bare(self, env: Env, p: Params, x: Array) -> Array:
        """The product without the bias."""
        x = self._whole(env, x)
        return product(env.xp, flat(x), p["weight"].T).reshape(*x.shape[:-1], p["weight"].shape[0])

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        whole = self._whole(env, x)
        y = affine(env.xp, flat(whole), p["weight"], p["bias"] if self.bias else None)
        y = y.reshape(*whole.shape[:-1], p["weight"].shape[0])
        if self.gather_output:
            y = moves.join(env.xp, env.mesh.tensor, y, -1, self.out_features, what=named(env, "output"))
        return y, (x,)

    def backward(self, env: Env, p: Params, g: Params, saved: Any, dy: Array) -> Array:
        (x,) = saved
        comm, dy = env.mesh.tensor, self._part(env, dy)
        if comm.size == 1:
            return linear_backward(env.xp, g, p["weight"], flat(dy), flat(x)).reshape(x.shape)
        whole = moves.Pending(None, lambda: x)
        if self.sequence and "weight" in g:
            whole = moves.start_gather(env.xp, comm, x, 1, what=named(env, "input"))
        dx = self._start_input_gradient(env, p, dy)
        _add_gradients(env, g, dy, whole.wait())
        return dx.wait()

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        dy = self._part(env, dy)
        return self._start_input_gradient(env, p, dy).wait(), (*saved, dy)

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        x, dy = kept
        _add_gradients(env, g, dy, self._whole(env, x) if "weight" in g else x)

    def _whole(self, env: Env, x: Array) -> Array:
        """The input as every rank needs it."""
        want_last(self, x, self.in_features)
        return moves.gather(env.xp, env.mesh.tensor, x, 1, what=named(env, "input")) if self.sequence else x

    def _part(self, env: Env, dy: Array) -> Array:
        """The gradient of what this rank computed."""
        return moves.cut(env.xp, env.mesh.tensor, dy, -1) if self.gather_output else dy

    def _start_input_gradient(self, env: Env, p: Params, dy: Array) -> moves.Pending:
        dx = product(env.xp, flat(dy), p["weight"]).reshape(*dy.shape[:-1], self.in_features)
        comm, what = env.mesh.tensor, named(env, "input gradient")
        if self.sequence:
            return moves.start_scatter_sum(env.xp, comm, dx, 1, even=True, what=what)
        return moves.start_sum(env.xp, comm, dx, fresh=True, what=what)


class RowLinear(Layer):
    """`Linear` of an input that is cut along its features: this rank's part of `in_features` -> `(..., out_features)`.

    Parameters as `Linear` has them and begins them; `weight` is cut along dim 1 in multiples of `grain`, `bias` is
    whole on every rank and added once, after the sum over the axis. sequence: the sum is left cut along dim 1; the
    gradient of `bias` is then this rank's part of it.
    """

    runs = ("linear",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        sequence: bool = False,
        grain: int = 1,
        *,
        init: Init | None = None,
        bias_init: Init | None = None,
    ) -> None:
        positive(self, grain=grain)
        self._linear = Linear(in_features, out_features, bias, init=init, bias_init=bias_init)
        self.in_features = in_features
        self.out_features = out_features
        self.bias = bool(bias)
        self.sequence = bool(sequence)
        self.grain = grain
        self.init = init
        self.bias_init = bias_init
        self._cut = Cut(1, 1, grain)
        self._cut.grains((out_features, in_features))

    def specs(self) -> dict[str, Spec]:
        specs = self._linear.specs()
        return specs | {"weight": replace(specs["weight"], cut=self._cut)}

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        want_last(self, x, p["weight"].shape[1])
        bias, shape = p["bias"] if self.bias else None, (*x.shape[:-1], self.out_features)
        if env.mesh.tensor.size == 1:
            return affine(env.xp, flat(x), p["weight"], bias).reshape(shape), (x,)
        y = self._summed(env, product(env.xp, flat(x), p["weight"].T).reshape(shape))
        if bias is not None:
            y += bias
        return y, (x,)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        (x,) = saved
        whole = dy
        if self.sequence:
            whole = moves.gather(env.xp, env.mesh.tensor, dy, 1, what=named(env, "output gradient"))
        dx = product(env.xp, flat(whole), p["weight"])
        return dx.reshape(x.shape), (x, whole, dy)

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        x, whole, dy = (flat(array) for array in kept)
        if not self.sequence:
            add_linear(env.xp, g, whole, x)
            return
        add_product(env.xp, g, "weight", whole.T, x)
        if "bias" in g:
            add_sum(env.xp, g["bias"], dy, 0)

    def _summed(self, env: Env, y: Array) -> Array:
        comm, what = env.mesh.tensor, named(env, "output")
        if self.sequence:
            return moves.scatter_sum(env.xp, comm, y, 1, even=True, what=what)
        return moves.sum(env.xp, comm, y, fresh=True, what=what)


def _add_gradients(env: Env, g: Params, dy: Array, x: Array) -> None:
    """As `add_linear`; with a frozen weight `x` may still be cut."""
    if x.shape[:-1] == dy.shape[:-1]:
        add_linear(env.xp, g, flat(dy), flat(x))
    elif "bias" in g:
        add_sum(env.xp, g["bias"], flat(dy), 0)


def named(env: Env, thing: str) -> str:
    """What is moved, for errors: the layer's path and the array."""
    return f"{env.random.path} {thing}" if env.random.path else thing
