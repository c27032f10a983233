"""What is seen of a trainer from outside: its engine and placement, measurements, and what results depend on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fsdpx.core.base.extensions import load_extension
from fsdpx.core.engine.engine import Engine
from fsdpx.core.state.placement import Placement
from fsdpx.core.trainer.call_runner import EVERY, KEEPS, CallRunner, LastUpdate
from fsdpx.optim import get_learning_rate
from fsdpx.optim.optimizer import unwrap

__all__ = ["Inspection"]

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Inspection:
    """What is seen of a trainer, as `trainer.inspect`: its engine and placement, its last update, and measurements."""

    __slots__ = ("_host", "_parameters", "_step")

    def __init__(
        self, host: CallRunner, step: Callable[[Any, Any], float], parameters: Callable[[], Mapping[str, np.ndarray]]
    ) -> None:
        self._host, self._step, self._parameters = host, step, parameters

    @property
    def engine(self) -> Engine:
        """The engine that runs the programs of this rank."""
        return self._host.session.engine

    @property
    def placement(self) -> Placement:
        """The fixed choices of this rank: layout, mesh, formats, options."""
        return self._host.placement

    @property
    def last_update(self) -> LastUpdate | None:
        """The last update: its loss, gradient norm and learning rate."""
        return self._host.last

    @property
    def loss_weight(self) -> float:
        """What the last `evaluate` averaged over: samples, or what the loss counts."""
        return self._host.weight

    @property
    def lr(self) -> float:
        """The learning rate of the next update. It is the optimiser's: a rate that changes is a function of the step,
        `optim.SGD(lr=lambda step: 0.1 / step)`."""
        return get_learning_rate(self.placement.optimizer, self._host.session.state.steps + 1)

    def list_settings(self) -> dict[str, str]:
        """The settings that results depend on beside seed and data, as text: layers, loss, optimiser, current learning
        rate. The same on every mesh: model and loss are those of one process."""
        session, place = self._host.session, self.placement
        optimizer, clip = unwrap(place.optimizer), place.options.clip_norm
        settings_by_name = {f"layer {node.path or '0'}": _describe_value(node.layer) for node in session.model.nodes}
        settings_by_name |= {
            "loss": _describe_value(session.loss),
            "clip_norm": str(clip),
            "learning rate": f"{self.lr:.6g}",
        }
        options = vars(optimizer) if hasattr(optimizer, "__dict__") else {}
        settings_by_name |= {
            f"optimizer.{name}": _describe_value(value) for name, value in options.items() if name != "lr"
        }
        return settings_by_name | {"optimizer": type(optimizer).__name__}

    def compute_fingerprint(self) -> str:
        """SHA-256 over names, formats, shapes and bytes of all parameters: equal if and only if all bits are.
        Collective."""
        digest = hashlib.sha256()
        for name, array in sorted(self._parameters().items()):
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def gather_summary(self) -> Any:
        """The reports of all ranks, with the same numbers: time by verb over ranks, bandwidth, overlap, imbalance, and
        memory at its most beside the plan, as a `ReportSummary`. Printed, a table. Collective."""
        return self._host.run_call(EVERY, "summary", lambda: load_extension("trainer", "summary")(self._host))

    def gather_expert_load(self) -> dict[str, Any]:
        """How the load of experts was in training, a `ExpertLoad` by the path of their layer, over all ranks since the
        last `reset`. Collective."""
        return self._host.run_call(EVERY, "routing", lambda: load_extension("trainer", "routing")(self._host))

    def measure(self, x: Any, y: Any, steps: int = 5) -> Any:
        """Train some steps and keep time of every action, on all ranks of the pipe; see `fsdpx.ext.observe.measure`."""
        measure = load_extension("trainer", "measure")
        return self._host.run_call(KEEPS, "measure", lambda: measure(self.engine, lambda: self._step(x, y), steps))

    def save_trace(self) -> None:
        """Write the last steps into the folder of `distribute(trace=...)`, one file per rank; `fit` and `close` do so,
        too. Nothing where no trace is kept. Collective."""
        self._host.require_open("save_trace")
        if self.engine.hooks.write_files:
            self._host.agree_on_call("save_trace")
            self._host.session.save_trace()

    def reset_counters(self) -> None:
        """Restart counting traffic and time."""
        self.engine.reset_counters()


def _describe_value(value: Any) -> str:
    """Functions and objects without a repr of their own show an address there, which differs each time."""
    return _ADDRESS.sub("", repr(value))
