"""Both versions of a kernel; and whole trainings, whose gradients begin as NaN."""

from modes import mode as mode
from poison import poison as poison
