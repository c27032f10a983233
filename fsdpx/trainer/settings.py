"""The settings of a training, as text: a checkpoint keeps them, and a resumed run names those that have changed."""

from __future__ import annotations

import re
from typing import Any

from fsdpx.nn.sort import Sorted
from fsdpx.optim.rounded import inside
from fsdpx.state.placement import Placement

__all__ = ["settings_of"]

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def settings_of(model: Sorted, loss: Any, placement: Placement, rate: float) -> dict[str, str]:
    """By name. The same on every mesh: model and loss are those of one process. rate: the current learning rate."""
    optimizer, clip = inside(placement.optimizer), placement.options.clip_norm
    found = {f"layer {node.path or '0'}": _words(node.layer) for node in model.nodes}
    found |= {"loss": _words(loss), "clip_norm": str(clip), "learning rate": f"{rate:.6g}"}
    options = vars(optimizer) if hasattr(optimizer, "__dict__") else {}
    found |= {f"optimizer.{name}": _words(value) for name, value in options.items() if name != "lr"}
    return found | {"optimizer": type(optimizer).__name__}


def _words(value: Any) -> str:
    """Functions and objects without a repr of their own show an address there, which differs each time."""
    return _ADDRESS.sub("", repr(value))
