"""`LayerContract` and `LossContract`, base classes with tests that every layer and every loss must pass."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import numpy as np

from fsdpx.core.array import shapes
from fsdpx.core.array.kernels.choice import use_mode
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.comm.mesh import make_single_rank_axes
from fsdpx.nn.container import unwrap_single
from fsdpx.nn.init import make_initial_values
from fsdpx.nn.layer import Layer, LayerContext
from fsdpx.nn.layer_list import find_dtypes_read_by_inputs
from fsdpx.nn.losses import Loss
from fsdpx.testing.threads import run_interleaved

__all__ = ["LayerContract", "LossContract"]

Arrays = tuple[np.ndarray, ...]
_make_axes = cache(make_single_rank_axes)


class GradientContract:
    """Base class of the test classes for layers and losses."""

    training = True
    """Whether layers run in training mode (see `LayerContext`)."""
    step = 1e-6
    """Step size of the central differences."""
    tolerance = 1e-6
    """Allowed difference between a gradient and the central difference. It is relative to the central difference, or
    absolute if the absolute value of the central difference is below 1."""
    tolerance32 = 1e-4
    """Allowed difference between float32 and float64 results, both relative and absolute."""

    def make(self) -> Any:
        """Return a new instance of the layer or loss to test. Must be overridden."""
        raise NotImplementedError

    def draw_integers(self, below: int, *shape: int) -> np.ndarray:
        """Return random integers in [0, below), the same in every run.

        Parameters
        ----------
        below : upper bound, excluded
        shape : shape of the array
        """
        return np.random.default_rng(sum(shape)).integers(0, below, shape)

    def test_repr_shows_the_configuration(self) -> None:
        text = repr(self.make())
        assert text.startswith(type(self.make()).__name__), text
        assert " at 0x" not in text, text

    def _make_layer_context(self, xp: Any, row: int = 0) -> LayerContext:
        from fsdpx.core.array.random import Random

        return LayerContext(xp, _make_axes(), Random(seed=5, path="layer", step=3, row=row), self.training)

    def _compute_central_difference(self, near: list[float]) -> float:
        return (near[0] - near[1]) / (2 * self.step)

    def _assert_close(self, got: float, want: float, what: str) -> None:
        limit = self.tolerance * max(1.0, abs(want))
        assert abs(got - want) <= limit, f"{what}: backward gives {got!r}, the central difference {want!r}"


class LayerContract(GradientContract):
    """Tests for a layer. Inherit from this class, define `make` and `inputs`, and run the tests with pytest:

        class TestScale(LayerContract):
            def make(self): return Scale(6)
            def inputs(self): return self.draw_normal(4, 6)

    Gradients are compared in float64 with central differences along random directions (`step`, `tolerance`)."""

    samples_are_independent = True
    """Whether the result for a sample is independent of the other samples (False for BatchNorm)."""

    def make(self) -> Layer:
        """Return a new instance of the layer to test. Must be overridden."""
        raise TypeError(f"{type(self).__name__} must define make(), which returns the layer to be tested")

    def inputs(self) -> Any:
        """Return inputs for the layer: an array, or a tuple of arrays. Each array is float64 or integer, and has at
        least 2 samples in dim 0. Must be overridden."""
        raise TypeError(f"{type(self).__name__} must define inputs(), which returns what the layer is tested on")

    def draw_normal(self, *shape: int) -> np.ndarray:
        """Return normally distributed float64 numbers, the same in every run.

        Parameters
        ----------
        shape : shape of the array
        """
        return np.random.default_rng(sum(shape)).standard_normal(shape)

    def test_the_gradient_of_the_input_is_the_derivative(self) -> None:
        layer, x, p = self._make_test_case()
        _, dy, dx, _ = self._run_forward_backward(layer, p, x)
        moving = [i for i, part in enumerate(x) if part.dtype.kind == "f"]
        assert all(dx[i] is None for i in range(len(x)) if i not in moving), "integers have no gradient: None"
        if not moving:
            return
        for seed in range(3):
            directions = {i: _draw_direction(seed, x[i]) for i in moving}
            near = [_shift_along_directions(x, directions, s) for s in (self.step, -self.step)]
            want = self._compute_central_difference([_compute_dot(self._forward(layer, p, z)[0], dy) for z in near])
            got = sum(float(np.sum(dx[i] * directions[i])) for i in moving)
            self._assert_close(got, want, "d input along a random direction")

    def test_the_gradient_of_each_parameter_is_the_derivative(self) -> None:
        layer, x, p = self._make_test_case()
        _, dy, _, g = self._run_forward_backward(layer, p, x)
        for name in g:
            for seed in range(3):
                direction = _draw_direction(seed, p[name])
                near = [{**p, name: p[name] + s * direction} for s in (self.step, -self.step)]
                want = self._compute_central_difference([_compute_dot(self._forward(layer, q, x)[0], dy) for q in near])
                self._assert_close(float(np.sum(g[name] * direction)), want, f"d {name} along a random direction")

    def test_backward_adds_to_the_gradients(self) -> None:
        layer, x, p = self._make_test_case()
        _, _, _, once = self._run_forward_backward(layer, p, x)
        before = {name: _draw_direction(7, array) for name, array in once.items()}
        twice = {name: array.copy() for name, array in before.items()}
        self._run_forward_backward(layer, p, x, g=twice)
        for name in once:
            np.testing.assert_allclose(twice[name] - before[name], once[name], rtol=1e-9, atol=1e-9, err_msg=name)

    def test_freezing_one_parameter_leaves_other_gradients(self) -> None:
        layer, x, p = self._make_test_case()
        _, _, dx, whole = self._run_forward_backward(layer, p, x)
        for frozen in whole:
            rest = {name: np.zeros_like(array) for name, array in whole.items() if name != frozen}
            _, _, dx_frozen, _ = self._run_forward_backward(layer, p, x, g=rest)
            assert frozen not in rest
            for name in rest:
                np.testing.assert_array_equal(rest[name], whole[name], err_msg=f"{name} without {frozen}")
            for a, b in zip(dx, dx_frozen, strict=True):
                np.testing.assert_array_equal(a, b)

    def test_backward_leaf_gives_same_parameter_gradients(self) -> None:
        layer, x, p = self._make_test_case()
        _, dy, _, want = self._run_forward_backward(layer, p, x)
        _, saved = self._forward(layer, p, x)
        got = self._make_zero_gradients(layer, p)
        layer.backward_leaf(self._make_layer_context(np), p, got, saved, unwrap_single(dy))
        for name in want:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)

    def test_thread_ranks_may_share_one_instance(self) -> None:
        """Check that two threads can run the forward and backward passes of one layer concurrently, each on its own
        samples. The results must be bit-identical to the results of separate runs."""
        layer, x, p = self._make_test_case()
        halves = [tuple(part[rows] for part in x) for rows in (slice(None), slice(None, None, -1))]
        wanted = [self._run_forward_backward(self.make(), p, half) for half in halves]
        found = run_interleaved(*[partial(self._run_forward_backward, layer, p, half) for half in halves])
        for got, want in zip(found, wanted, strict=True):
            for mine, theirs in zip((*got[0], *got[2]), (*want[0], *want[2]), strict=True):
                np.testing.assert_array_equal(mine, theirs)
            for name in want[3]:
                np.testing.assert_array_equal(got[3][name], want[3][name], err_msg=name)

    def test_arguments_are_not_modified(self) -> None:
        layer, x, p = self._make_test_case()
        state = {name for name, spec in layer.specs().items() if spec.state}
        x_before, p_before = [part.copy() for part in x], {name: array.copy() for name, array in p.items()}
        y, saved = layer.forward(self._make_layer_context(np), p, unwrap_single(x))
        dy = unwrap_single([_draw_direction(17, part) for part in _as_tuple(y)])
        dy_before = [part.copy() for part in _as_tuple(dy)]
        layer.backward(self._make_layer_context(np), p, self._make_zero_gradients(layer, p), saved, dy)
        for before, after in zip(x_before, x, strict=True):
            np.testing.assert_array_equal(after, before, err_msg="forward or backward changed its input")
        for before, after in zip(dy_before, _as_tuple(dy), strict=True):
            np.testing.assert_array_equal(after, before, err_msg="backward changed dy")
        for name in p.keys() - state:
            np.testing.assert_array_equal(p[name], p_before[name], err_msg=f"{name} was changed")

    def test_empty_batch_gives_empty_results(self) -> None:
        layer, x, p = self._make_test_case()
        whole, _, _, _ = self._run_forward_backward(layer, p, x)
        y, _, dx, g = self._run_forward_backward(layer, p, tuple(part[:0] for part in x))
        for part, full in zip(y, whole, strict=True):
            assert part.shape == (0, *full.shape[1:])
        for part, given in zip(dx, x, strict=True):
            assert part is None or part.shape == (0, *given.shape[1:])
        for name, array in g.items():
            np.testing.assert_array_equal(array, 0.0, err_msg=f"no samples, but a gradient of {name}")

    def test_samples_are_computed_independently(self) -> None:
        """Split a batch into two parts. Check that the parts give the same outputs as the full batch, even if the layer
        draws random numbers. Also check that the parameter gradients of the parts add up to the gradients of the full
        batch."""
        layer, x, p = self._make_test_case()
        if not self.samples_are_independent:
            return
        y, dy, dx, g = self._run_forward_backward(layer, p, x)
        added = self._make_zero_gradients(layer, p)
        for rows, first in ((slice(0, 1), 0), (slice(1, None), 1)):
            env = self._make_layer_context(np, row=first)
            y_part, saved = layer.forward(env, p, unwrap_single([a[rows] for a in x]))
            dx_part = layer.backward(env, p, added, saved, unwrap_single([d[rows] for d in dy]))
            for a, b in zip((*_as_tuple(y_part), *_as_tuple(dx_part)), (*y, *dx), strict=True):
                if b is not None:
                    np.testing.assert_allclose(a, b[rows], rtol=1e-9, atol=1e-12)
        for name in g:
            np.testing.assert_allclose(added[name], g[name], rtol=1e-9, atol=1e-12, err_msg=name)

    def test_float32_stays_float32(self) -> None:
        layer, x, p = self._make_test_case()
        wide = self._run_forward_backward(layer, p, x)
        p32 = {name: array.astype(np.float32) for name, array in p.items()}
        narrow = self._run_forward_backward(layer, p32, _as_floats(x, np.float32))
        for mine, theirs in zip((*narrow[0], *narrow[2]), (*wide[0], *wide[2]), strict=True):
            if theirs is not None:
                assert mine.dtype == np.float32, f"float32 became {mine.dtype}"
                np.testing.assert_allclose(mine, theirs, rtol=self.tolerance32, atol=self.tolerance32)
        for name, array in narrow[3].items():
            scale = max(1.0, float(np.max(np.abs(wide[3][name]), initial=0.0)))
            got, want = array / scale, wide[3][name] / scale
            np.testing.assert_allclose(got, want, rtol=0, atol=self.tolerance32, err_msg=name)

    def test_bfloat16_stays_bfloat16(self) -> None:
        layer, x, p = self._make_test_case()
        dtype = parse_dtype("bf16")
        # array code is enough: compiled kernels return the same dtypes, and compiling them would take seconds
        with use_mode("plain"):
            p16 = {name: array.astype(dtype) for name, array in p.items()}
            y, _, dx, _ = self._run_forward_backward(layer, p16, _as_floats(x, dtype))
        for array in (*y, *dx):
            assert array is None or array.dtype == dtype, f"bfloat16 became {array.dtype}"

    def test_shape_only_arrays_give_the_same_shapes_and_dtypes(self) -> None:
        for dtype in (np.float64, np.float32):
            layer, x, p = self._make_test_case()
            x = x if dtype is np.float64 else _as_floats(x, np.float32)
            p = {name: array.astype(dtype) for name, array in p.items()}
            y, _, dx, g = self._run_forward_backward(layer, p, x)
            flat_p = {name: shapes.ShapeArray(array.shape, array.dtype) for name, array in p.items()}
            flat_g = {name: shapes.ShapeArray(array.shape, array.dtype) for name, array in g.items()}
            env = self._make_layer_context(shapes)
            y_flat, saved = layer.forward(env, flat_p, unwrap_single([shapes.ShapeArray(a.shape, a.dtype) for a in x]))
            dy_flat = unwrap_single([shapes.ShapeArray(a.shape, a.dtype) for a in _as_tuple(y_flat)])
            dx_flat = _as_tuple(layer.backward(env, flat_p, flat_g, saved, dy_flat))
            assert [_get_shape_and_dtype(a) for a in _as_tuple(y_flat)] == [_get_shape_and_dtype(a) for a in y]
            assert [_get_shape_and_dtype(a) for a in dx_flat] == [_get_shape_and_dtype(a) for a in dx]

    def test_integer_inputs_are_declared(self) -> None:
        """Check that `Layer.takes` declares which inputs are integers. This is necessary because a trainer converts all
        other inputs to floats."""
        layer, x, _ = self._make_test_case()
        takes = find_dtypes_read_by_inputs(layer, len(x), [frozenset()] * layer.n_outputs)
        wrong = [i for i, part in enumerate(x) if part.dtype.kind in "iub" and takes[i] == {"numbers"}]
        assert not wrong, f'inputs {wrong} are whole numbers: the class must say so, takes = "indices" or "given"'

    def test_initial_values_have_spec_shape(self) -> None:
        for name, spec in self.make().specs().items():
            whole = spec.init(3, name, 0, spec.size, spec.shape)
            assert whole.shape == (spec.size,), name
            assert np.all(np.isfinite(whole)), name
            cut = spec.size // 3
            np.testing.assert_array_equal(spec.init(3, name, cut, spec.size, spec.shape), whole[cut:])

    def _make_test_case(self) -> tuple[Layer, Arrays, dict[str, np.ndarray]]:
        layer = self.make()
        x = _as_tuple(self.inputs())
        assert all(len(part) >= 2 for part in x), "inputs() must give at least 2 samples"
        p = make_initial_values(layer.specs(), seed=1, dtype=np.float64)
        # add noise to the parameters: if they were exactly 0 or 1, the test would not notice a missing factor
        moved = {n: a + 0.1 * np.abs(_draw_direction(11, a)) for n, a in p.items()}
        return layer, x, moved

    def _forward(self, layer: Layer, p: Mapping[str, np.ndarray], x: Arrays) -> tuple[Arrays, Any]:
        """Run the forward pass on a copy of the parameters, because the forward pass may update running statistics.
        Return the outputs, and what the forward pass saved for the backward pass."""
        own = {name: array.copy() for name, array in p.items()}
        y, saved = layer.forward(self._make_layer_context(np), own, unwrap_single(x))
        return _as_tuple(y), saved

    def _run_forward_backward(
        self, layer: Layer, p: Mapping[str, np.ndarray], x: Arrays, g: dict[str, np.ndarray] | None = None
    ) -> tuple[Arrays, Arrays, Arrays, dict[str, np.ndarray]]:
        """Run the forward pass, and then the backward pass with random output gradients. Return the outputs, and the
        gradients of the outputs, of the inputs and of the parameters. Parameter gradients are added to `g`, or to zeros
        if `g` is None."""
        y, saved = self._forward(layer, p, x)
        dy = tuple(_draw_direction(13, part).astype(part.dtype) for part in y)
        g = self._make_zero_gradients(layer, p) if g is None else g
        dx = layer.backward(self._make_layer_context(np), p, g, saved, unwrap_single(dy))
        return y, dy, _as_tuple(dx), g

    def _make_zero_gradients(self, layer: Layer, p: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: np.zeros_like(p[name]) for name, spec in layer.specs().items() if spec.trainable}


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _draw_direction(seed: int, like: np.ndarray) -> np.ndarray:
    return np.random.default_rng([seed, like.size]).standard_normal(like.shape)


def _compute_dot(y: Arrays, dy: Arrays) -> float:
    return sum(float(np.sum(a * b)) for a, b in zip(y, dy, strict=True))


def _shift_along_directions(x: Arrays, directions: dict[int, np.ndarray], step: float) -> Arrays:
    return tuple(a + step * directions[i] if i in directions else a for i, a in enumerate(x))


def _as_floats(x: Arrays, dtype: Any) -> Arrays:
    return tuple(a.astype(dtype) if a.dtype.kind == "f" else a for a in x)


def _get_shape_and_dtype(a: Any) -> Any:
    return None if a is None else (tuple(a.shape), np.dtype(a.dtype))


class LossContract(GradientContract):
    """Tests for a loss. Inherit from this class, define `make`, `outputs` and `target`, and run the tests with pytest:

        class TestHuber(LossContract):
            def make(self): return Huber()
            def outputs(self): return self.draw_normal(6, 5)
            def target(self): return self.draw_normal(6, 5, seed=1)

    Gradients are compared in float64 with central differences along random directions (`step`, `tolerance`)."""

    def make(self) -> Loss:
        """Return a new instance of the loss to test. Must be overridden."""
        raise TypeError(f"{type(self).__name__} must define make(), which returns the loss to be tested")

    def outputs(self) -> Any:
        """Return model outputs to compute the loss for: a float64 array with at least 3 samples, or a tuple of these
        arrays. Must be overridden."""
        raise TypeError(f"{type(self).__name__} must define outputs(), which returns what a model gives")

    def target(self) -> np.ndarray:
        """Return targets for the samples of `outputs`. Must be overridden."""
        raise TypeError(f"{type(self).__name__} must define target(), which returns what outputs are compared with")

    def draw_normal(self, *shape: int, seed: int = 0) -> np.ndarray:
        """Return normally distributed float64 numbers, the same in every run.

        Parameters
        ----------
        shape : shape of the array
        seed : seed of the random numbers
        """
        return np.random.default_rng([seed, sum(shape)]).standard_normal(shape)

    def test_total_and_weight_are_finite_numbers(self) -> None:
        total, weight, _ = self._forward(*self._make_test_case())
        assert np.isfinite([total, weight]).all(), (total, weight)
        assert weight > 0, f"the weight of a whole batch is {weight}"

    def test_backward_is_the_derivative_of_the_total(self) -> None:
        y, target = self._make_test_case()
        dy = self._backward(y, target, 1.0)
        for seed in range(3):
            along = tuple(_draw_direction(seed, part) for part in y)
            near = [tuple(p + s * d for p, d in zip(y, along, strict=True)) for s in (self.step, -self.step)]
            want = self._compute_central_difference([self._forward(moved, target)[0] for moved in near])
            self._assert_close(_compute_dot(dy, along), want, "d outputs along a random direction")

    def test_seed_multiplies_the_gradient(self) -> None:
        y, target = self._make_test_case()
        for one, quarter in zip(self._backward(y, target, 1.0), self._backward(y, target, 0.25), strict=True):
            np.testing.assert_allclose(quarter, 0.25 * one, rtol=1e-12)

    def test_both_passes_together_give_the_same_results(self) -> None:
        y, target = self._make_test_case()
        env, loss = self._make_layer_context(np), self.make()
        if hasattr(loss, "forward_and_backward"):
            total, weight, dy = loss.forward_and_backward(env, unwrap_single(y), target, 0.5)
            ulps = 16 * float(np.finfo(y[0].dtype).eps)
            np.testing.assert_allclose((float(total), float(weight)), self._forward(y, target)[:2], rtol=ulps)
            for found, want in zip(_as_tuple(dy), self._backward(y, target, 0.5), strict=True):
                np.testing.assert_allclose(found, want, rtol=ulps, atol=ulps * float(np.abs(want).max(initial=0.0)))

    def test_thread_ranks_may_share_one_instance(self) -> None:
        y, target = self._make_test_case()
        loss, env = self.make(), self._make_layer_context(np)

        def both(loss: Loss) -> tuple[float, float, Arrays]:
            total, weight, saved = loss.forward(env, unwrap_single(y), target)
            return float(total), float(weight), _as_tuple(loss.backward(env, saved, 0.5))

        want = both(self.make())
        for found in run_interleaved(*[lambda: both(loss)] * 2):
            assert found[:2] == want[:2]
            for got, wanted in zip(found[2], want[2], strict=True):
                np.testing.assert_array_equal(got, wanted)

    def test_parts_of_a_batch_add_up(self) -> None:
        """Check that the loss sums, weights and gradients of the parts of a batch add up to the values for the full
        batch. This is necessary because batches are split over ranks and microbatches. A part may be empty."""
        y, target = self._make_test_case()
        n = len(target)
        self._assert_adds_up(y, target, [slice(0, 1), slice(1, n - 1), slice(n - 1, n), slice(n, n)], 0)

    def test_parts_of_a_sequence_add_up(self) -> None:
        """If the loss has `acts_on = "position"`, check that the loss sums of the parts of a sequence add up to the
        loss sum of the full sequence."""
        y, target = self._make_test_case()
        if self.make().acts_on == "position" and target.ndim > 1 and all(part.ndim > 1 for part in y):
            self._assert_adds_up(y, target, [slice(0, 1), slice(1, None)], 1)

    def test_empty_batch_has_zero_weight(self) -> None:
        y, target = self._make_test_case()
        nothing = tuple(part[:0] for part in y)
        total, weight, _ = self._forward(nothing, target[:0])
        assert (total, weight) == (0.0, 0.0)
        for given, dy in zip(nothing, self._backward(nothing, target[:0], 1.0), strict=True):
            assert dy.shape == given.shape

    def test_gradients_have_the_shape_and_dtype_of_the_outputs(self) -> None:
        y, target = self._make_test_case()
        narrow, (target32,) = _as_floats(y, np.float32), _as_floats((target,), np.float32)
        total, weight, _ = self._forward(y, target)
        total32, weight32, _ = self._forward(narrow, target32)
        assert weight32 == weight
        assert abs(total32 - total) <= self.tolerance32 * max(1.0, abs(total)), (total32, total)
        wide = self._backward(y, target, 1.0)
        for given, dy, want in zip(narrow, self._backward(narrow, target32, 1.0), wide, strict=True):
            assert dy.dtype == np.float32, f"float32 became {dy.dtype}"
            assert dy.shape == given.shape
            np.testing.assert_allclose(dy, want, rtol=self.tolerance32, atol=self.tolerance32)

    def test_gradients_of_bfloat16_are_bfloat16(self) -> None:
        y, target = self._make_test_case()
        dtype = parse_dtype("bf16")
        with use_mode("plain"):
            found = self._backward(_as_floats(y, dtype), _as_floats((target,), dtype)[0], 0.5)
        for dy in found:
            assert dy.dtype == dtype, f"bfloat16 became {dy.dtype}"

    def test_arguments_are_not_modified(self) -> None:
        y, target = self._make_test_case()
        before = [part.copy() for part in (*y, target)]
        self._backward(y, target, 0.5)
        for mine, theirs in zip(before, (*y, target), strict=True):
            np.testing.assert_array_equal(theirs, mine)

    def test_shape_only_arrays_give_the_same_shapes_and_dtypes(self) -> None:
        given, target = self._make_test_case()
        env, loss = self._make_layer_context(shapes), self.make()
        for y in (given, _as_floats(given, np.float32)):
            flat = [shapes.ShapeArray(part.shape, part.dtype) for part in (*y, target)]
            total, weight, saved = loss.forward(env, unwrap_single(flat[:-1]), flat[-1])
            assert np.isfinite([float(total), float(weight)]).all()
            dy = _as_tuple(loss.backward(env, saved, 1.0))
            assert [(tuple(d.shape), d.dtype) for d in dy] == [(part.shape, part.dtype) for part in y]

    def test_validate_accepts_target_and_rejects_wrong_shapes(self) -> None:
        from fsdpx.errors import DataError

        y, target = self._make_test_case()
        loss, shape = self.make(), unwrap_single([part.shape for part in y])
        loss.validate(shape, target)
        for wrong in (target[:-1], target[..., None]):
            try:
                loss.validate(shape, wrong)
            except DataError:
                continue
            raise AssertionError(f"validate({shape}, target of shape {wrong.shape}) must raise DataError")

    def _make_test_case(self) -> tuple[Arrays, np.ndarray]:
        y, target = _as_tuple(self.outputs()), self.target()
        assert len(target) >= 3, "target() must give at least 3 samples"
        assert all(len(part) == len(target) for part in y), "outputs() and target() must have as many samples"
        return y, target

    def _forward(self, y: Arrays, target: np.ndarray) -> tuple[float, float, Any]:
        total, weight, saved = self.make().forward(self._make_layer_context(np), unwrap_single(y), target)
        return float(total), float(weight), saved

    def _backward(self, y: Arrays, target: np.ndarray, seed: float) -> Arrays:
        _, _, saved = self._forward(y, target)
        return _as_tuple(self.make().backward(self._make_layer_context(np), saved, seed))

    def _assert_adds_up(self, y: Arrays, target: np.ndarray, cuts: list[slice], dim: int) -> None:
        at = [(slice(None),) * dim + (cut,) for cut in cuts]
        total, weight, _ = self._forward(y, target)
        pieces = [(tuple(part[i] for part in y), target[i]) for i in at]
        found = [self._forward(*piece) for piece in pieces]
        self._assert_close(sum(part[0] for part in found), total, "the total of the parts")
        assert sum(part[1] for part in found) == weight, "weights of the parts do not add up to that of the whole"
        whole = self._backward(y, target, 1.0)
        for k, want in enumerate(whole):
            got = np.concatenate([self._backward(*piece, 1.0)[k] for piece in pieces], axis=dim)
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
