"""A module is cut in a child process, and whatever happens to that the result is the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fsdpx.errors import ConfigError  # noqa: E402
from fsdpx.interop import apart as apart_module  # noqa: E402
from fsdpx.interop.apart import apart  # noqa: E402
from fsdpx.interop.cut import _layout  # noqa: E402
from fsdpx.interop.described import Layout, dumped, loaded  # noqa: E402

tnn = torch.nn


class Net(tnn.Module):
    """A list of units, a buffer, a constant of its own, an inner graph, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = tnn.ModuleList([tnn.Linear(4, 4) for _ in range(3)])
        self.norm = tnn.BatchNorm1d(4)
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x) + self.shift
        with torch.no_grad():
            scale = torch.sigmoid(x.sum(0)) * torch.tensor([0.5, 1.0, 1.5, 2.0])
        return self.norm(x * scale)


def layout() -> Layout:
    return _layout(Net(), [np.ones((3, 4), np.float32)], None, None)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes that were forked. Threads of the test's runner must not count."""
    found, fork = [], os.fork

    def noted() -> int:
        child = fork()
        found.append(child)
        return child

    monkeypatch.setattr(os, "fork", noted)
    monkeypatch.setattr(
        threading, "enumerate", lambda: [threading.current_thread(), threading.Thread(name="fsdpx watchdog")]
    )
    return found


def gone(child: int) -> bool:
    try:
        os.kill(child, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_description_survives_the_way_between_processes() -> None:
    found = layout()
    assert repr(loaded(dumped(found))) == repr(found)
    units = {unit.name: unit for unit in found.units}
    assert list(units) == ["blocks.0", "blocks.1", "blocks.2", "norm"]
    assert units["norm"].graph is None
    assert units["blocks.2"].parameters == [("weight", "blocks.2.weight"), ("bias", "blocks.2.bias")]
    assert "shift" in units["blocks.1"].constants
    assert repr(units["blocks.1"].graph) == repr(units["blocks.2"].graph) != repr(units["blocks.0"].graph)


def test_a_child_does_the_work(children: list[int]) -> None:
    here = []
    found = apart(lambda: here.append(1) or layout())  # type: ignore[func-returns-value]
    assert repr(found) == repr(layout())
    assert here == []
    assert len(children) == 1
    assert gone(children[0])


@pytest.mark.parametrize("end", [
    lambda: os._exit(0), lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: time.sleep(60), lambda: 1 / 0,
], ids=["ends", "is killed", "hangs", "raises"])  # fmt: skip
def test_what_the_child_does_not_give_is_done_here(
    end: Any, children: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart_module, "PATIENCE", 1.0)
    process, wanted = os.getpid(), layout()

    def work() -> Layout:
        return wanted if os.getpid() == process else end()

    assert apart(work) is wanted
    assert gone(children[0])


def test_errors_are_those_of_this_process(children: list[int]) -> None:
    def work() -> Layout:
        raise ConfigError(f"in process {os.getpid()}")

    with pytest.raises(ConfigError, match=f"in process {os.getpid()}"):
        apart(work)
    assert len(children) == 1


def test_beside_other_threads_no_process_is_forked(children: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread(), threading.Thread(name="rank 1")])
    assert repr(apart(layout)) == repr(layout())
    assert children == []


def test_the_exporter_is_not_imported_here() -> None:
    script = """
import sys, numpy, torch
from fsdpx.interop.torch import from_torch
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
before = set(sys.modules)
print(list(from_torch(net, numpy.ones((3, 4), numpy.float32)).children()))
print([name for name in ("sympy", "networkx", "torch._dynamo", "torch.export") if name in set(sys.modules) - before])
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["['0', '2']", "[]"], done.stderr
