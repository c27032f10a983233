"""One matrix in many layouts of memory."""

import numpy as np

LAYOUTS = ("rows", "columns", "wide rows", "wide columns", "every second", "backwards")


def lay(values: np.ndarray, layout: str) -> np.ndarray:
    """The same values with other strides."""
    m, n = values.shape
    made = {
        "rows": lambda: np.empty((m, n), values.dtype),
        "columns": lambda: np.empty((n, m), values.dtype).T,
        "wide rows": lambda: np.empty((m, n + 3), values.dtype)[:, 1 : n + 1],
        "wide columns": lambda: np.empty((n, m + 5), values.dtype)[:, 2 : m + 2].T,
        "every second": lambda: np.empty((m, 2 * n), values.dtype)[:, ::2],
        "backwards": lambda: np.empty((m, n), values.dtype)[::-1],
    }[layout]()
    made[...] = values
    return made
