"""LossContract: tests of what every loss must do, to be inherited."""

from typing import Any

import numpy as np

from fsdpx.nn.layer import Env
from fsdpx.nn.losses import Loss
from fsdpx.testing.threads import interleaved

__all__ = ["LossContract"]

Arrays = tuple[np.ndarray, ...]


class LossContract:
    """Inherit, define `make`, `outputs` and `target`, and run it with pytest:

        class TestHuber(LossContract):
            def make(self): return Huber()
            def outputs(self): return self.normal(6, 5)
            def target(self): return self.normal(6, 5, seed=1)

    Gradients are compared in float64 with central differences along random directions (`step`, `tolerance`)."""

    step = 1e-6
    """Step of the central differences."""
    tolerance = 1e-6
    """Largest difference from the central difference, relative to it, or absolute where it is below 1."""
    tolerance32 = 1e-4
    """Largest difference of float32 from float64 results, likewise."""

    def make(self) -> Loss:
        """A new loss to be tested."""
        raise TypeError(f"{type(self).__name__} must define make(), which returns the loss to be tested")

    def outputs(self) -> Any:
        """What a model gives: a float64 array, or a tuple of them if the loss takes several; at least 3 samples."""
        raise TypeError(f"{type(self).__name__} must define outputs(), which returns what a model gives")

    def target(self) -> np.ndarray:
        """What the outputs are compared with, as many samples."""
        raise TypeError(f"{type(self).__name__} must define target(), which returns what outputs are compared with")

    def normal(self, *shape: int, seed: int = 0) -> np.ndarray:
        """Normally distributed numbers of this shape, the same in every run."""
        return np.random.default_rng([seed, sum(shape)]).standard_normal(shape)

    def integers(self, below: int, *shape: int) -> np.ndarray:
        """Integers in [0, below) of this shape, the same in every run."""
        return np.random.default_rng(sum(shape)).integers(0, below, shape)

    def test_total_and_weight_are_finite_numbers(self) -> None:
        total, weight, _ = self._forward(*self._setting())
        assert np.isfinite([total, weight]).all(), (total, weight)
        assert weight > 0, f"the weight of a whole batch is {weight}"

    def test_backward_is_the_derivative_of_the_total(self) -> None:
        y, target = self._setting()
        dy = self._backward(y, target, 1.0)
        for seed in range(3):
            along = [np.random.default_rng([seed, part.size]).standard_normal(part.shape) for part in y]
            near = [tuple(p + s * d for p, d in zip(y, along, strict=True)) for s in (self.step, -self.step)]
            above, below = (self._forward(moved, target)[0] for moved in near)
            got = sum(float(np.sum(g * d)) for g, d in zip(dy, along, strict=True))
            self._close(got, (above - below) / (2 * self.step))

    def test_seed_multiplies_the_gradient(self) -> None:
        y, target = self._setting()
        for one, quarter in zip(self._backward(y, target, 1.0), self._backward(y, target, 0.25), strict=True):
            np.testing.assert_allclose(quarter, 0.25 * one, rtol=1e-12)

    def test_ranks_that_are_threads_may_share_it(self) -> None:
        y, target = self._setting()
        loss, env = self.make(), self._env(np)

        def both(loss: Loss) -> tuple[float, float, Arrays]:
            total, weight, saved = loss.forward(env, _pack(y), target)
            return float(total), float(weight), _parts(loss.backward(env, saved, 0.5))

        want = both(self.make())
        for found in interleaved(*[lambda: both(loss)] * 2):
            assert found[:2] == want[:2]
            for got, wanted in zip(found[2], want[2], strict=True):
                np.testing.assert_array_equal(got, wanted)

    def test_parts_of_a_batch_add_up(self) -> None:
        """Ranks, microbatches and chunks have parts of the batch, some of them none of it."""
        y, target = self._setting()
        n = len(target)
        self._adds_up(y, target, [slice(0, 1), slice(1, n - 1), slice(n - 1, n), slice(n, n)], 0)

    def test_parts_of_a_sequence_add_up(self) -> None:
        """Only for a loss that says so: `acts_on` is "position"."""
        y, target = self._setting()
        if self.make().acts_on == "position" and target.ndim > 1 and all(part.ndim > 1 for part in y):
            self._adds_up(y, target, [slice(0, 1), slice(1, None)], 1)

    def test_no_samples_weigh_nothing(self) -> None:
        y, target = self._setting()
        nothing = tuple(part[:0] for part in y)
        total, weight, _ = self._forward(nothing, target[:0])
        assert (total, weight) == (0.0, 0.0)
        for given, dy in zip(nothing, self._backward(nothing, target[:0], 1.0), strict=True):
            assert dy.shape == given.shape

    def test_gradients_have_the_shape_and_dtype_of_the_outputs(self) -> None:
        y, target = self._setting()
        narrow = tuple(part.astype(np.float32) for part in y)
        total, weight, _ = self._forward(y, target)
        total32, weight32, _ = self._forward(narrow, self._as_float32(target))
        assert weight32 == weight
        assert abs(total32 - total) <= self.tolerance32 * max(1.0, abs(total)), (total32, total)
        wide = self._backward(y, target, 1.0)
        for given, dy, want in zip(narrow, self._backward(narrow, self._as_float32(target), 1.0), wide, strict=True):
            assert dy.dtype == np.float32, f"float32 became {dy.dtype}"
            assert dy.shape == given.shape
            np.testing.assert_allclose(dy, want, rtol=self.tolerance32, atol=self.tolerance32)

    def test_nothing_that_was_passed_in_is_changed(self) -> None:
        y, target = self._setting()
        before = [part.copy() for part in (*y, target)]
        self._backward(y, target, 0.5)
        for mine, theirs in zip(before, (*y, target), strict=True):
            np.testing.assert_array_equal(theirs, mine)

    def test_shape_only_arrays_give_the_same_shapes_and_dtypes(self) -> None:
        from fsdpx import shapes as xp

        y, target = self._setting()
        flat = [xp.ShapeArray(part.shape, part.dtype) for part in (*y, target)]
        env, loss = self._env(xp), self.make()
        total, weight, saved = loss.forward(env, _pack(flat[:-1]), flat[-1])
        assert all(isinstance(float(number), float) for number in (total, weight))
        dy = _parts(loss.backward(env, saved, 1.0))
        assert [(tuple(d.shape), d.dtype) for d in dy] == [(part.shape, part.dtype) for part in y]

    def test_validate_takes_the_target_and_refuses_others(self) -> None:
        from fsdpx.errors import DataError

        y, target = self._setting()
        loss, shape = self.make(), _pack([part.shape for part in y])
        loss.validate(shape, target)
        for wrong in (target[:-1], target[..., None]):
            try:
                loss.validate(shape, wrong)
            except DataError:
                continue
            raise AssertionError(f"validate({shape}, target of shape {wrong.shape}) must raise DataError")

    def test_repr_shows_the_configuration(self) -> None:
        text = repr(self.make())
        assert text.startswith(type(self.make()).__name__), text
        assert " at 0x" not in text, text

    def _setting(self) -> tuple[Arrays, np.ndarray]:
        y, target = _parts(self.outputs()), self.target()
        assert len(target) >= 3, "target() must give at least 3 samples"
        assert all(len(part) == len(target) for part in y), "outputs() and target() must have as many samples"
        return y, target

    def _env(self, xp: Any) -> Env:
        from fsdpx.array.random import Random
        from fsdpx.comm.mesh import alone

        return Env(xp, alone(), Random(seed=5))

    def _forward(self, y: Arrays, target: np.ndarray) -> tuple[float, float, Any]:
        total, weight, saved = self.make().forward(self._env(np), _pack(y), target)
        return float(total), float(weight), saved

    def _backward(self, y: Arrays, target: np.ndarray, seed: float) -> Arrays:
        _, _, saved = self._forward(y, target)
        return _parts(self.make().backward(self._env(np), saved, seed))

    def _adds_up(self, y: Arrays, target: np.ndarray, cuts: list[slice], dim: int) -> None:
        at = [(slice(None),) * dim + (cut,) for cut in cuts]
        total, weight, _ = self._forward(y, target)
        pieces = [(tuple(part[i] for part in y), target[i]) for i in at]
        found = [self._forward(*piece) for piece in pieces]
        self._close(sum(part[0] for part in found), total)
        assert sum(part[1] for part in found) == weight, "weights of the parts do not add up to that of the whole"
        whole = self._backward(y, target, 1.0)
        for k, want in enumerate(whole):
            got = np.concatenate([self._backward(*piece, 1.0)[k] for piece in pieces], axis=dim)
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)

    def _as_float32(self, target: np.ndarray) -> np.ndarray:
        return target.astype(np.float32) if target.dtype.kind == "f" else target

    def _close(self, got: float, want: float) -> None:
        limit = self.tolerance * max(1.0, abs(want))
        assert abs(got - want) <= limit, f"{got!r} instead of {want!r}"


def _pack(parts: Any) -> Any:
    return parts[0] if len(parts) == 1 else tuple(parts)


def _parts(value: Any) -> Any:
    return value if isinstance(value, tuple) else (value,)
