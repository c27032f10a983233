"""A module is cut in a child process, and whatever happens to that the result is the same."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fsdpx.errors import ConfigError  # noqa: E402
from fsdpx.ext.interop import module_splitting as apart_module  # noqa: E402
from fsdpx.ext.interop.module_splitting import (  # noqa: E402
    TensorValue,
    UnitShapes,
    _lay_out_units_of_module,
    dump_layout,
    load_layout,
    run_in_child_or_here,
)
from fsdpx.ext.interop.torch_context import may_draw_random_numbers  # noqa: E402

tnn = torch.nn
pytestmark = pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")  # of JAX, if a test loaded it


class Net(tnn.Module):
    """A list of units, a buffer, a constant of its own, an inner graph, and a batch norm."""

    def __init__(self):
        super().__init__()
        self.blocks = tnn.ModuleList([tnn.Linear(4, 4) for _ in range(3)])
        self.norm = tnn.BatchNorm1d(4)
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x):
        for block in self.blocks:
            x = block(x) + self.shift
        with torch.no_grad():
            scale = torch.sigmoid(x.sum(0)) * torch.tensor([0.5, 1.0, 1.5, 2.0])
        return self.norm(x * scale)


def layout():
    return _lay_out_units_of_module(Net(), [np.ones((3, 4), np.float32)], None, None)


@pytest.fixture
def children(monkeypatch):
    """Processes that were forked. Threads of the test's runner must not count."""
    found, fork = [], os.fork

    def noted():
        child = fork()
        found.append(child)
        return child

    monkeypatch.setattr(os, "fork", noted)
    monkeypatch.setattr(
        threading, "enumerate", lambda: [threading.current_thread(), threading.Thread(name="fsdpx watchdog")]
    )
    return found


def demand_gone(child):
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_description_survives_the_way_between_processes():
    found = layout()
    assert repr(load_layout(dump_layout(found))) == repr(found)
    units = {unit.name: unit for unit in found.units}
    assert list(units) == ["blocks.0", "blocks.1", "blocks.2", "norm"]
    assert units["norm"].graph is None
    assert units["blocks.2"].parameters == [("weight", "blocks.2.weight"), ("bias", "blocks.2.bias")]
    assert "shift" in units["blocks.1"].constants
    assert repr(units["blocks.1"].graph) == repr(units["blocks.2"].graph) != repr(units["blocks.0"].graph)


def test_a_child_does_the_work(children):
    here = []
    assert repr(run_in_child_or_here(lambda: here.append(1) or layout())) == repr(layout())
    assert here == []
    assert len(children) == 1
    demand_gone(children[0])


@pytest.mark.parametrize("end", [
    lambda: os._exit(0), lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: time.sleep(60), lambda: 1 / 0,
], ids=["ends", "is killed", "hangs", "raises"])  # fmt: skip
def test_what_the_child_does_not_give_is_done_here(end, children, monkeypatch):
    monkeypatch.setattr(apart_module, "EXPORT_TIMEOUT_SECONDS", 1.0)
    process, wanted = os.getpid(), layout()

    def work():
        return wanted if os.getpid() == process else end()

    assert run_in_child_or_here(work) is wanted
    demand_gone(children[0])


def test_errors_are_those_of_this_process(children):
    def work():
        raise ConfigError(f"in process {os.getpid()}")

    with pytest.raises(ConfigError, match=f"in process {os.getpid()}"):
        run_in_child_or_here(work)
    assert len(children) == 1


def test_beside_other_threads_no_process_is_forked(children, monkeypatch):
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread(), threading.Thread(name="rank 1")])
    assert repr(run_in_child_or_here(layout)) == repr(layout())
    assert children == []


def test_neither_cutting_nor_training_imports_the_exporter():
    script = """
import sys, numpy, torch, fsdpx
from fsdpx.ext.interop.torch import from_torch
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Dropout(0.0), torch.nn.Linear(4, 2))
x = numpy.ones((3, 4), numpy.float32)
before = set(sys.modules)
model = from_torch(net, x)
print(list(model.children()))
trainer = fsdpx.distribute(model, loss=fsdpx.nn.MSELoss(), optimizer=fsdpx.optim.SGD(lr=0.1))
print(trainer.step(x, x[:, :2]) > trainer.step(x, x[:, :2]))
print([name for name in ("sympy", "networkx", "torch._dynamo", "torch.export") if name in set(sys.modules) - before])
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["['0', '3']", "True", "[]"], done.stderr


GIVEN = {
    "fits": ((2, 3, 8), "float32", (2, 3), "int32"),
    "another size": ((2, 3, 7), "float32", (2, 3), "int64"),
    "sizes that differ": ((2, 3, 8), "float32", (2, 4), "int64"),
    "another format": ((2, 3, 8), "float64", (2, 3), "int64"),
    "no numbers": ((2, 3, 8), "float32", (2, 3), "float32"),
    "a dim less": ((2, 8), "float32", (2, 3), "int64"),
}


@pytest.mark.parametrize("what", GIVEN)
def test_a_result_has_the_sizes_that_are_read_and_of_what_does_not_fit_nothing_is_known(what):
    inputs = [TensorValue(["s0", "s1", 8], "float32"), TensorValue(["s0", "s1"], "int64")]
    shapes = UnitShapes(inputs, TensorValue(["s0", 8, "s1"], "float32"))
    shape, kind, other_shape, other_kind = GIVEN[what]
    found = shapes.find_result_shape_and_dtype([np.empty(shape, kind), np.empty(other_shape, other_kind)])
    assert found == (((2, 8, 3), "float32") if what == "fits" else None)


@pytest.mark.parametrize(("operation", "drawn"), [
    (tnn.Dropout(0.5), True), (tnn.Dropout(0.0), False), (tnn.GELU(), False), (tnn.RReLU(), True),
], ids=lambda value: getattr(type(value), "__name__", ""))  # fmt: skip
def test_operations_that_draw_are_known(operation, drawn):
    net, x = tnn.Sequential(tnn.Sequential(tnn.Linear(4, 4), operation)), np.ones((3, 4), np.float32)
    (unit,) = _lay_out_units_of_module(net, [x], lambda path, module: path == "0", None).units
    assert may_draw_random_numbers(unit.graph.to_graph_module()) is drawn
