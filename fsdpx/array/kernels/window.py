"""A window that moves over an image: where it lies, as strided slices of the image with its padding."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["SlidingWindow"]


@dataclass(frozen=True)
class SlidingWindow:
    """A window of `kernel` (height, width) that moves by `stride` over an image with `padding` around it."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @property
    def size(self) -> int:
        """Places of the window."""
        return math.prod(self.kernel)

    @property
    def dot(self) -> bool:
        """Whether it is one pixel after the other."""
        return (self.kernel, self.stride, self.padding) == ((1, 1), (1, 1), (0, 0))

    def out(self, shape: Sequence[int]) -> tuple[int, int]:
        """Height and width of the result for an image of (samples, channels, height, width)."""
        sides = zip(shape[2:], self.kernel, self.stride, self.padding, strict=True)
        height, width = ((size + 2 * p - k) // s + 1 for size, k, s, p in sides)
        return height, width

    def places(self, out: tuple[int, int]) -> Iterator[tuple[slice, ...]]:
        """For each place of the window, the pixels of the padded image under it, as a strided slice."""
        (height, width), (down, right) = out, self.stride
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                rows = slice(i, i + down * (height - 1) + 1, down)
                yield slice(None), slice(None), rows, slice(j, j + right * (width - 1) + 1, right)

    def padded(self, xp: Any, x: Any, value: float) -> Any:
        if self.padding == (0, 0):
            return x
        image = xp.full(self._padded_shape(x.shape), value, dtype=x.dtype)
        image[self._inside(x.shape)] = x
        return image

    def cut(self, image: Any, shape: Sequence[int]) -> Any:
        """The inverse of `padded`, as a view."""
        return image[self._inside(shape)]

    def empty_gradient(self, xp: Any, shape: Sequence[int], dtype: Any) -> Any:
        """Zeros in the shape of the padded image."""
        return xp.zeros(self._padded_shape(shape), dtype=dtype)

    def _padded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[:2], shape[2] + 2 * self.padding[0], shape[3] + 2 * self.padding[1])

    def _inside(self, shape: Sequence[int]) -> tuple[slice, ...]:
        (top, left), (height, width) = self.padding, shape[2:]
        return slice(None), slice(None), slice(top, top + height), slice(left, left + width)
