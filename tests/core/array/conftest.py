"""Fixtures: both versions of a kernel, every float dtype."""

import numpy as np
import pytest
from modes import mode as mode

from fsdpx.core.array import parse_dtype


@pytest.fixture(params=["float64", "float32", "float16", "bf16"])
def dtype(request) -> np.dtype:
    return parse_dtype(request.param)
