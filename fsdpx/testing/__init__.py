"""Contract test classes that users inherit for their own communicators, layers, losses, optimisers and schedules; the
comparison of arrays that names the worst element; a clock for thread ranks that step at their own speed."""

from importlib import import_module
from typing import Any

_HOME = {
    "CodecContract": "fsdpx.testing.codec",
    "CommunicatorContract": "fsdpx.testing.communicator",
    "LayerContract": "fsdpx.testing.layer",
    "LossContract": "fsdpx.testing.layer",
    "OptimizerContract": "fsdpx.testing.optimizer",
    "ScheduleContract": "fsdpx.testing.schedule",
    "demand_close": "fsdpx.testing.compare",
    "difference": "fsdpx.testing.compare",
    "VirtualTime": "fsdpx.testing.virtual_time",
}

__all__ = [
    "CodecContract", "CommunicatorContract", "LayerContract", "LossContract", "OptimizerContract", "ScheduleContract",
    "VirtualTime", "demand_close", "difference",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
