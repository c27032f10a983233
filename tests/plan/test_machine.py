"""Machines: those that come with fsdpx, and files with mistakes."""

import re
import threading
from collections import Counter

import pytest

from fsdpx import nn
from fsdpx.core.array.shapes.flop_counter import ProductCount, WorkCount
from fsdpx.core.comm import COMPLETED, CommunicatorWrapper, spawn
from fsdpx.errors import ConfigError
from fsdpx.plan import Compute, Machine, measuring, predict
from fsdpx.plan.time_model import compute_work_seconds

GOOD = """\
name = "mine"

[compute]
flops = {float32 = 1e12}
memory = 1e11

[[levels]]
name = "host"
ranks = 4
latency = 1e-6
bandwidth = 1e10

[[levels]]
name = "system"
latency = 1e-5
bandwidth = 1e9
"""


def test_those_that_come_with_fsdpx():
    names = Machine.list_names()
    others = {"epyc-100g", "xeon-200g", "ethernet-10g", "ethernet-25g", "laptop"}
    assert {"a100-dgx-200g", "h100-dgx-400g", "h200", *others} == {*names}
    for name in names:
        machine = Machine.load(name)
        assert machine.name == name
        assert Machine.load(machine) is machine
        assert machine.compute.flops["float32"] > 0


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("memory = 1e11\n", "", "[compute]: memory is missing; say it"),
        ("memory = 1e11", "memory = -1", "[compute]: memory = -1; a number above 0 is needed"),
        ("memory = 1e11", "memory = true", "[compute]: memory = True; a number above 0 is needed"),
        ("latency = 1e-5", "latency = nan", "[[levels]] 2: latency = nan; a number of at least 0 is needed"),
        ("bandwidth = 1e9", "bandwith = 1e9", "[[levels]] 2: bandwith is not known; the keys here are name,"),
        ("ranks = 4", "ranks = 0", "[[levels]] 1: ranks = 0; a number above 0 is needed"),
        ('"system"\n', '"system"\nranks = 2\n', "[[levels]] 2: system holds 2 ranks; more than the 4 of"),
        ("{float32 = 1e12}", "1e12", "[compute]: flops = 1000000000000.0; a table by format is needed"),
        ("{float32 = 1e12}", "{int8 = 1e12}", "[compute]: flops = {'int8': 1000000000000.0}; a table by"),
        ("{float32 = 1e12}", "{float32 = 0}", "[compute]: flops = {'float32': 0}; a number above 0 is needed"),
        ("memory = 1e11", "memory = 1e11\nefficiency = 1.5", "[compute]: efficiency = 1.5; at most 1 is needed"),
        ("memory = 1e11", "memory = 1\nmemory_efficiency = 0", "[compute]: memory_efficiency = 0; a num"),
        ("[compute]", "[ compute ] # all\nspill = -1", "[compute]: spill = -1; a number of at least 0"),
        ('"mine"', "true", "the machine: name = True; a str is needed"),
        ("ranks = 4", "ranks = 2.5", "[[levels]] 1: ranks = 2.5; a whole number is needed"),
        ("ranks = 4\n", "", "[[levels]] 1: ranks is missing; only the last level holds all"),
        ('"system"\n', "'system'\nranks = 4\n", "[[levels]] 2: system holds 4 ranks; more than the 4 of"),
        ("[compute]", "[computes]", "[compute]: missing; say flops and memory"),
        ("[compute]", "[disk]\nwrite = 1e9\n[compute]", "[disk]: read is missing; say it"),
        ("[compute]", "[disk]\nwrite = 0\n[compute]", "[disk]: write = 0; a number above 0 is needed"),
        ("[compute]", "[disk]\nspeed = 1e9\n[compute]", "[disk]: speed is not known; the keys here are write"),
        ('"mine"\n', '"mine"\ndisk = 3\n', "[disk]: 3 is no table; one with write and read"),
        ('"host"', "3", "[[levels]] 1: name = 3; a str is needed"),
    ],
)
def test_mistakes_are_named_with_section_and_key(old, new, says, tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=re.escape(f"machine file {path}, {says}")):
        Machine.load(path)


MISSING = {
    "name": ("a10", "^machine='a10' is none of a100-dgx-200g, .*, and no file of that name exists"),
    "file": ("gone.toml", r"gone\.toml: there is no such file; write .* or name one of a100-dgx-200g,"),
    "longer than names of files": ("x" * 5000, "and no file of that name exists"),
}


@pytest.mark.parametrize("what", MISSING)
def test_no_machine(what):
    name, says = MISSING[what]
    with pytest.raises(ConfigError, match=says):
        Machine.load(name)


COMPUTE = "[compute]\nflops = {float32 = 1}\nmemory = 1\n"
NO_MACHINES = {
    "x = = 1": r"machine file .*odd\.toml: Invalid value \(at line 1",
    f"levels = [3]\n{COMPUTE}": r"odd\.toml, \[\[levels\]\] 1: 3 is no table; one with name and",
    COMPUTE: r"odd\.toml, \[\[levels\]\]: no level; say at least one",
}


@pytest.mark.parametrize(("text", "says"), NO_MACHINES.items())
def test_a_file_that_is_none(text, says, tmp_path):
    path = tmp_path / "odd.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        Machine.load(path)


def test_a_call_takes_as_long_as_on_the_slowest_of_the_ranks(monkeypatch):
    now = threading.local()  # the clock of a rank
    monkeypatch.setattr(measuring, "perf_counter", lambda: now.seconds)

    class Meeting(CommunicatorWrapper):
        def barrier(self, *, what=""):
            now.seconds = max(self.comm.all_gather_value(now.seconds))
            return COMPLETED

    def body(comm):
        now.seconds = 0.0

        def call():
            now.seconds += 0.01 if comm.rank else 0.02  # as if rank 0 had half a core

        return measuring._measure_mean_call_seconds_over_ranks(Meeting(comm), call, measuring.Processors())

    assert spawn(body, 3) == [pytest.approx(0.02)] * 3


@pytest.mark.parametrize(
    ("cores", "ranks", "times"), [(0.5, 4, 1), (0.5, 3, 1), (0.5, 2, 2), (0.6667, 2, 2), (1, 2, 1)]
)
def test_ranks_with_a_core_of_their_own_are_as_much_quicker(cores, ranks, times, tmp_path):
    path, here = tmp_path / "machine.toml", 3 if cores == 0.6667 else 4
    text = GOOD.replace("ranks = 4", f"ranks = {here}").replace("memory = 1e11", "memory = 1e11\nlaunch = 1e-5")
    batch = (((12, 64), "float32"),) * 2
    whole = []
    for line in ("", f"cores = {cores}\n"):
        path.write_text(text.replace("[compute]\n", f"[compute]\n{line}"))
        whole.append(predict(nn.Linear(64, 64), batch, ranks=ranks, machine=path).parts["compute"])
    assert whole[0] / whole[1] == pytest.approx(times)


@pytest.mark.parametrize(("gpu", "seconds"), [(False, 0.75), (True, 0.5)])
def test_a_processor_reads_what_it_multiplies_first_and_a_gpu_meanwhile(gpu, seconds):
    """1,000 products of 32 x 32 x 32 in float32: 65,536,000 FLOP and 12,288,000 bytes."""
    compute = Compute({"float32": 65_536_000 / 0.25}, 12_288_000 / 0.5, gpu=gpu)
    work = WorkCount(Counter({ProductCount(32, 32, 32, 1000, 4): 1}))
    assert compute_work_seconds(work, compute, "bf16") == pytest.approx(seconds)
