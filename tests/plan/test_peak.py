"""The peak of memory in words: what it consists of, and that changes lower it as far as is said."""

import json
import re

import numpy as np
import pytest
from commands import shown

import fsdpx
from fsdpx import nn, optim
from fsdpx.core.array.shapes import ShapeArray
from fsdpx.core.base.messages import format_bytes
from fsdpx.core.comm import FakeCommunicator
from fsdpx.core.state.step_inputs import StepInputs
from fsdpx.ext.observe.recording import TimelineRecorder
from fsdpx.plan import predict
from fsdpx.plan.peak import Holding, MemoryPeak, OptionChange, format_option_changes, list_memory_lowering_changes

WIDTH = 64
PAGE = 4 * WIDTH * WIDTH
ROWS = 8


def chain(layers=4):
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])


GIVEN = {"loss": nn.MSELoss(), "optimizer": optim.SGD(), "group_bytes": 0, "tune": False}


def dry(**options):
    x = ((ROWS, WIDTH), "float32")
    return fsdpx.dry_run(chain(), x, x, ranks=2, **GIVEN | options)


def held(peak):
    return {one.what: one.nbytes for one in peak.holdings}


def test_what_is_held_is_known():
    """DDP: parameters and gradients in full; a linear layer keeps its input."""
    peak, value = dry(strategy="ddp").peak, 4 * ROWS * WIDTH
    assert held(peak) == {
        "that layers compute with, float32": 4 * PAGE,
        "as backward adds them up, float32": 4 * PAGE,
        "the batch": 2 * value,
        "kept for backward": 3 * value,  # the first keeps the batch
        "values between units": value,
        "what the action computes": value,  # the gradient
    }
    assert (peak.action, peak.about) == ("LOSS.0", "the step program")
    kept = next(one for one in peak.holdings if one.what == "kept for backward")
    assert kept.units == (("1", value), ("2", value), ("3", value))
    assert peak.memory == {"parameters": 4 * PAGE, "gradients": 4 * PAGE, "activations": 7 * value}


def test_gathered_parameters_are_those_of_units_and_the_sum_is_all():
    run = dry(strategy="fsdp")
    peak = run.peak
    assert held(peak)["that the optimizer updates, float32"] == 2 * PAGE
    gathered = next(one for one in peak.holdings if one.what == "gathered parameters")
    assert all(name in "0123" and nbytes == PAGE for name, nbytes in gathered.units)
    passing = sum(row.nbytes for row in run.trainer.inspect.engine.state.ledger if row.is_freed_by_update)
    assert peak.nbytes == sum(run.report.memory.values()) + run.peak_heap_bytes - passing


@pytest.mark.parametrize("options", [{}, {"strategy": "ddp", "recompute": "all"}, {"microbatches": 4}])
def test_a_real_rank_holds_the_same_activations(options):
    """By slot, when the action that holds most begins."""
    x = np.zeros((ROWS, WIDTH), "float32")
    peak = dry(**options).peak

    def run(comm):
        trainer = chain().as_distributed(comm=comm, **GIVEN | options)
        recording = trainer.inspect.engine.add_observer(TimelineRecorder(1))
        trainer.step(x, x)
        acted = recording.records[-1].actions
        return acted[peak.number - 2].alive if str(acted[peak.number - 1].action) == peak.action else -1

    slots = ("kept for backward", "kept to compute it once more", "gradients of values", "values between units")
    there = sum(held(peak).get(what, 0) for what in slots)
    for alive in fsdpx.spawn(run, 2):
        assert there <= alive <= there + held(peak)["the batch"]  # a slot may hold a view of the batch


def test_units_one_after_another_that_hold_as_much_are_one():
    units = tuple((f"blocks.{n}", 10 if n < 3 else 2048) for n in range(4))
    peak = MemoryPeak("B3.0", "unit 'blocks.3'", 8, 20, (Holding("activations", "kept for backward", 2078, units),))
    first, head, _, *row = str(peak).splitlines()
    assert first == "the peak, 2.03 KiB, is in B3.0 (unit 'blocks.3'), action 8 of 20"
    assert head.split() == ["held", "then", "bytes"]
    assert " ".join(row).endswith("blocks.3 2.00 KiB, 3 units, blocks.0 to blocks.2, 10 B each")


def test_changes_lower_the_peak_to_what_they_then_hold():
    now = {"strategy": "ddp", "microbatches": 1, "schedule": "1f1b", "recompute": None, "group_bytes": 0}
    found = list_memory_lowering_changes(now, ROWS, lambda changes: (dry(**{**now, **changes}).peak.nbytes, None))
    words = [one.python_text for one in found]
    assert {"strategy='zero2'", "strategy='fsdp'", "microbatches=2", "precision='bf16-true'"} <= set(words)
    assert [one.nbytes for one in found] == sorted(one.nbytes for one in found)
    for one in found:
        assert one.nbytes == dry(**{**now, **one.options}).peak.nbytes < dry(**now).peak.nbytes
    assert "microbatches=4" not in words  # once more is another change


def test_changes_of_a_mesh_leave_its_other_axes():
    now = {"strategy": "ddp", "mesh": fsdpx.Mesh(replica=4, shard=1, pipe=2), "schedule": "gpipe"}
    tried = []
    assert list_memory_lowering_changes(now, 1, lambda changes: tried.append(changes) or (1, None)) == []
    tried = [OptionChange(changes, 0).python_text for changes in tried]
    assert "strategy='fsdp', mesh=fsdpx.Mesh(pipe=2)" in tried
    assert "schedule='1f1b'" in tried
    assert "offload=fsdpx.OffloadConfig('/local/disk', 'optimizer')" in tried


def test_times_of_changes_are_beside_them():
    found = [OptionChange({"recompute": "all"}, 1024, 3.0), OptionChange({"prefetch": 0}, 2048)]
    last = [line.split() for line in format_option_changes(found, 2.0).splitlines()[2:]]
    assert last[0] == ["1.00", "KiB", "+50.0%", "recompute='all'"]
    assert last[1][2:4] == ["not", "known"]
    assert format_option_changes([]) == "no other single choice lowers it by more than 1 %"


def test_a_prediction_says_what_would_lower_its_peak():
    x = ((16, WIDTH), "float32")
    found = predict(chain(), (x, x), ranks=2, machine="laptop", group_bytes=0)
    one = next(one for one in found.list_memory_lowering_changes() if one.python_text == "strategy='fsdp'")
    again = predict(chain(), (x, x), ranks=2, machine="laptop", group_bytes=0, strategy="fsdp")
    assert (one.nbytes, one.seconds) == (again.memory, again.seconds)
    assert found.peak.nbytes == found.memory > again.memory


def test_the_command_line_explains():
    words = "show gpt-tiny --ranks 4 --strategy ddp"
    text = shown(f"{words} --lower")
    assert "is in B3.0 (unit 'blocks.3..head'), action " in text
    assert re.search(r"\nlowered to +by this alone\n", text)
    found = json.loads(shown(f"{words} --lower --json"))
    assert found["peak"]["action"] == "B3.0"
    assert found["peak"]["bytes"] == sum(found["peak"]["kinds"].values())
    assert min(one["nbytes"] for one in found["lower"]) < found["peak"]["bytes"]
    for text in (shown(words), shown(f"{words} --json")):
        assert "peak" in text
        assert "lower" not in text  # ten more dry runs, where they are asked for
    words = "plan gpt-tiny --ranks 2 --machine laptop --batch 4 --most 2 --strategy fsdp --mesh shard=2 --json"
    planned = json.loads(shown(words))
    assert planned["peak"]["bytes"] == planned["found"][0]["memory"]
    assert {"recompute": "'all'"} in [one["options"] for one in planned["lower"]]


@pytest.mark.parametrize(
    "options", [{"strategy": "ddp"}, {"strategy": "fsdp", "microbatches": 2}, {"strategy": "zero2"}]
)
def test_a_peak_a_dry_run_a_prediction_and_an_error_count_memory_by_one_rule(options):
    run, whole = dry(**options), ((2 * ROWS, WIDTH), "float32")
    assert run.peak.memory == predict(chain(), (whole, whole), ranks=2, machine="laptop", **GIVEN | options).peak.memory
    made = fsdpx.distribute(chain(), comm=FakeCommunicator(0, 2), device="shape", **GIVEN | options)
    made.step(*(ShapeArray((ROWS, WIDTH), np.dtype("float32")) for _ in range(2)))
    text = str(made._session.make_out_of_memory_error(MemoryError("none left"), StepInputs(made.inspect.engine.batch)))
    plan = text.partition("plan of this rank")[2].partition("\n\n")[0].splitlines()[2:]
    found = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in plan}
    assert found == {k: format_bytes(n) for k, n in {**run.peak.memory, "in all": run.peak.nbytes}.items()}
