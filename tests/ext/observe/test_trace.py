"""Traces of real steps: what is in them, on which clock, and that both ends of a message find each other."""

import gzip
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from bits import bits
from commands import refused, shown
from models import CASES, Same, distributed, make, own_part
from threads import on_ranks
from trials import ROOT

import fsdpx
from fsdpx import ElasticConfig, Mesh, TraceConfig, nn, spawn
from fsdpx.core.program import VERBS, Action
from fsdpx.errors import ConfigError
from fsdpx.examples import models
from fsdpx.ext.observe import chrome
from fsdpx.ext.observe.chrome import RankTrace, TraceGroups, get_trace_file_name, merge_traces, read_traces
from fsdpx.ext.observe.measure import ClockReading, interpolate_offset, measure_clock_offset
from fsdpx.ext.observe.recording import ActionSpan, ProgramRecord, TransferSpan, find_timeline_recorder
from fsdpx.plan import predict


def trained(comm, folder, steps=3, case="gpt", **options):
    trainer = make(comm, case, trace=folder, **options)
    for _ in range(steps):
        trainer.step(*own_part(trainer.data_group, case, 8))
    return trainer


def unpacked(path):
    return json.loads(gzip.decompress(path.read_bytes()))


@pytest.fixture(scope="module")
def of_a_mesh(tmp_path_factory):
    """Traces of a pipe of two stages on two ranks each, which no test changes."""
    folder = tmp_path_factory.mktemp("mesh")
    spawn(lambda comm: trained(comm, folder, mesh=Mesh(pipe=2, shard=2), microbatches=3).close(), 4)
    return folder


@pytest.fixture
def traces(of_a_mesh, tmp_path):
    """A copy of them."""
    return Path(shutil.copytree(of_a_mesh, tmp_path / "traces"))


class Twice(nn.Linear):
    """Does its work twice."""

    def forward(self, env, params, x):
        super().forward(env, params, x)
        return super().forward(env, params, x)


def test_layers_inside_of_a_unit(tmp_path):
    """Twelve layers in one unit, a line of equal ones among them: bits as without a trace, each layer's time in the
    report, ten in its text, and slices inside of those of actions."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(11)], Twice(8, 8))
    batch = np.ones((4, 8), "float32"), np.ones((4, 8), "float32")

    def run(comm, trace):
        trainer = distributed(model, comm, group_bytes="1MiB", trace=trace, tune=False, recompute="all")
        for _ in range(3):
            trainer.step(*batch)
        trainer.evaluate(*batch)
        found = bits(trainer), trainer.report(), str(trainer.inspect.gather_summary())
        trainer.inspect.reset_counters()
        assert trainer.report().layers == {}
        trainer.close()
        return found

    plain, traced = (spawn(run, 2, trace) for trace in (None, tmp_path))
    assert plain[0][0] == traced[0][0]
    assert (plain[0][1].layers, "slowest layers" in plain[0][2]) == ({}, False)
    layers = traced[1][1].layers
    assert {*layers} == {str(n) for n in range(12)}
    assert all(one.forwards == 6 and one.forward > 0 and one.backward > 0 for one in layers.values())
    for text in (str(traced[0][1]), traced[0][2]):
        rows = re.search(r"^slowest layers +rank.*\n-+\n((?:\d+ .* %\n)+)12 layers; share", text, re.M)
        assert rows
        assert len(rows[1].splitlines()) == 10
    for one in read_traces(tmp_path):
        actions = [(e["ts"], e["ts"] + e["dur"]) for e in one.events if e.get("cat") == "compute"]
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in one.events if e.get("cat") == "layer"]
        assert len(spans) == 3 * 12 * 3  # steps, layers, forward twice and backward
        assert all(any(a <= begin and end <= b for a, b in actions) for begin, end in spans)


class Imported:
    """What Perfetto's trace processor makes of events, as far as it matters here: it sorts them by time, in whole
    nanoseconds, and keeps for each thread the slices that are open. A slice that ends after the one it begins in is
    dropped, and an arrow where no slice is open, or whose other end has not come before."""

    def __init__(self, events, cut):
        """cut: whether nanoseconds of a duration are cut off, as some versions do, and not rounded."""
        self.kept, self.flows, self.lost = [], [], []
        self._open, self._begun, self._cut = defaultdict(list), {}, cut
        for event in sorted((e for e in events if "ts" in e), key=lambda e: round(e["ts"] * 1000)):
            if event["ph"] == "X":
                self._slice(event)
            elif event["ph"] in "sf":
                self._arrow(event)

    def _slice(self, event):
        begin, long = round(event["ts"] * 1000), event["dur"] * 1000
        end = begin + (int(long) if self._cut else round(long))
        stack = self._open[event["pid"], event["tid"]]
        while stack and stack[-1][0] <= begin:
            stack.pop()
        if end < begin or any(end > other for other, _ in stack):
            self.lost.append(event)
            return
        stack.append((end, event))
        self.kept.append(event)

    def _arrow(self, event):
        stack, key = self._open[event["pid"], event["tid"]], (event["cat"], event["name"], event["id"])
        outside = not stack or stack[-1][0] < round(event["ts"] * 1000)
        if outside or (event["ph"] == "s") == (key in self._begun) or event.get("bp", "e") != "e":
            self.lost.append(event)
        elif event["ph"] == "s":
            self._begun[key] = stack[-1][1]
        else:
            self.flows.append((self._begun[key], stack[-1][1]))


def test_a_trace_keeps_the_rules_of_its_format(traces):
    path, error, messages = merge_traces(traces)
    found = unpacked(path)
    events = found["traceEvents"]
    assert messages > 0
    assert error == pytest.approx(found["fsdpx"]["clock_error_between_ranks_us"] / 1e6, abs=1e-9)

    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert {(rank, lane) for rank in range(4) for lane in ("compute", "pipe", "shard", "world")} <= names
    for cut in (False, True):
        imported = Imported(events, cut)
        assert not imported.lost
        assert len(imported.kept) == sum(e["ph"] == "X" for e in events)
        assert len(imported.flows) == messages == sum(e["ph"] == "s" for e in events)
        for sent, came in imported.flows:
            assert sent["name"].replace("SEND", "RECV") == came["name"]
            assert all(sent["args"][name] == came["args"][name] for name in ("bytes", "key"))
            assert sent["pid"] != came["pid"]
        assert counted(imported) == messages


@pytest.mark.parametrize("late", [0, 2])
def test_no_message_arrives_before_it_is_sent(traces, late):
    """The clock of a rank is wrong by more than a message takes, as on a busy machine."""
    path = traces / get_trace_file_name(late)
    found = unpacked(path)
    found["fsdpx"]["clock"] = [(at, offset + 0.05, 0.05) for at, offset, _ in found["fsdpx"]["clock"]]
    path.write_bytes(gzip.compress(json.dumps(found).encode()))
    messages = merge_traces(traces)[2]
    imported = Imported(unpacked(traces / chrome.MERGED)["traceEvents"], False)
    assert not imported.lost
    assert len(imported.flows) == messages > 0
    assert 0 < max(one.delay for one in read_traces(traces)) <= 0.1


def test_a_simulated_step_lies_beside_a_measured_one(traces):
    path = traces / chrome.SIMULATED
    line = ["gpt-tiny", "--mesh", "pipe=2,shard=2", "--microbatches", "3", "--batch", "6", "--trace", str(path)]
    alone, messages = merge_traces(traces)[1:]
    assert f"traced: {path}, 2 of 4 ranks of epyc-100g, simulated" in shown(["show", *line])
    assert merge_traces(traces)[1:] == (alone, messages)
    events = unpacked(traces / chrome.MERGED)["traceEvents"]
    imported = Imported(events, False)
    assert not imported.lost
    assert len(imported.flows) == messages + 2 * 3  # forward and back
    simulated = [event for event in events if event["pid"] >= 1_000_000]
    names = {e["args"]["name"] for e in simulated if e["name"] == "process_name"}
    assert names == {f"rank {2 * n + 1} (pipe {n} replica 0 shard 1 tensor 0) on epyc-100g, simulated" for n in (0, 1)}
    run = read_traces(traces)[0].header.shown
    begun = [e["ts"] for e in events if e["pid"] == 0 and e.get("cat") == "step" and e["args"]["run"] == run]
    assert min(e["ts"] for e in simulated if "ts" in e) == begun[0]
    assert all(e["args"]["bytes"] > 0 for e in simulated if e["ph"] == "C")
    path.write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=f"{chrome.SIMULATED}: no trace of fsdpx can be read there"):
        merge_traces(traces)


def test_a_simulated_trace_has_what_the_prediction_has(tmp_path):
    path = tmp_path / "step.json"  # as text
    shown(["show", "mlp", "--ranks", "2", "--machine", "laptop", "--trace", str(path)])
    events = json.loads(path.read_text())["traceEvents"]
    batch = ((256, 1024), "float32")
    found = predict(models.make_mlp(24, 1024, True), (batch, batch), ranks=2, machine="laptop", strategy="fsdp")
    slices = [e for e in events if e["ph"] == "X" and e["cat"] == "compute"]
    computed = [e for e in found.events if VERBS[e.action.op].lane == "compute"]
    assert [(e["name"], e["ts"]) for e in slices] == [(str(e.action), round(1e6 * e.start, 3)) for e in computed]
    moved = sum(e["args"].get("bytes", 0) for e in events if e["ph"] == "X" and e["cat"] == "shard")
    assert moved == found.bytes_sent["shard"]


def counted(imported):
    """Messages by the query of the page, over tables named as the trace processor names them."""
    query = re.findall(r"^```sql\n(.*?)^```", (ROOT / "docs" / "observe.md").read_text(), re.S | re.M)[0]
    number = {id(event): n for n, event in enumerate(imported.kept)}
    with closing(sqlite3.connect(":memory:")) as tables:
        tables.execute("create table slice (id, name)")
        tables.execute("create table flow (slice_out, slice_in)")
        tables.executemany("insert into slice values (?, ?)", [(number[id(e)], e["name"]) for e in imported.kept])
        tables.executemany("insert into flow values (?, ?)", [[number[id(e)] for e in ends] for ends in imported.flows])
        return int(tables.execute(query).fetchone()[0])


@on_ranks(3)
def test_events_are_the_program_and_their_bytes_all_that_moved(comm, tmp_path):
    trainer = trained(comm, tmp_path, steps=2, clip_norm=1.0)
    turns = list(find_timeline_recorder(trainer.inspect.engine).records)
    assert [record.number for record in turns] == [0, 1]
    assert all(record.is_complete for record in turns)
    place = TraceGroups.from_axes(trainer.inspect.placement.axes)
    moved = 0
    for record in turns:
        events = chrome.convert_program_record_to_events(record, place)
        assert [event.action for event in events] == list(record.program.actions)
        computing = [event for event in events if VERBS[event.action.op].lane == "compute"]
        assert all(before.end <= after.start for before, after in pairwise(computing))
        moved += sum(event.nbytes for event in events)
    counted = {call: n.bytes for (axis, call), n in trainer.report().traffic.items() if axis == "shard"}
    assert sum(counted.values()) <= moved <= trainer.inspect.placement.axes.counters.total
    keys = comm.all_gather_object([event.key for event in events if VERBS[event.action.op].lane == "shard"])
    assert len(keys[0]) > 0
    assert all(other == keys[0] for other in keys)


def test_a_message_is_not_sent_after_it_came():
    """Its call may return late: the other side has it by then."""
    send = Action("SEND", 0, 0)
    record = ProgramRecord(0, 0, None, [], [ActionSpan(send, 0.5, 1.0, 3.0, 8, 0)], [TransferSpan(send, 2.9, 3.5)])
    (event,) = chrome.convert_program_record_to_events(record, TraceGroups(0, {}))
    assert (event.start, event.end) == (1.0, 3.5)


def test_only_the_last_steps_are_kept_and_evaluation_is_not(tmp_path):
    def run(comm):
        trainer = trained(comm, TraceConfig(tmp_path, steps=2), steps=3, case="mlp")
        x, y = CASES["mlp"].batch(np.random.default_rng(0), 4)
        trainer.evaluate(x, y)
        assert [record.number for record in find_timeline_recorder(trainer.inspect.engine).records] == [1, 2]
        trainer.inspect.save_trace()

    spawn(run, 2)
    for one in read_traces(tmp_path):
        assert [e["name"] for e in one.events if e.get("cat") == "step"] == ["step 2", "step 3"]
        assert one.header.shown in (1, 2)
        assert len(one.header.simulated) == len(one.header.alive)


def test_without_a_trace_nothing_is_kept():
    assert spawn(lambda comm: find_timeline_recorder(make(comm, "mlp").inspect.engine), 1) == [None]


def test_the_variable_asks_for_a_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDPX_TRACE", str(tmp_path / "traced"))
    spawn(lambda comm: trained(comm, None, 1, "mlp").close(), 1)
    assert (tmp_path / "traced" / get_trace_file_name(0)).exists()


LOST = """
import sys
import numpy as np, fsdpx
from fsdpx import nn, optim
batch = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
made = {}
for name in ("lost", "closed", "saved", "later"):
    options = {"optimizer": optim.SGD(lr=0.1), "loss": nn.MSELoss(), "trace": f"{sys.argv[1]}/{name}"}
    made[name] = fsdpx.distribute(nn.Linear(2, 1), **options)
    made[name].step(*batch)
made["closed"].close()
made["saved"].inspect.save_trace()
made["later"].inspect.save_trace()
made["later"].step(*batch)
"""


def test_a_trace_that_nobody_wrote_is_told(tmp_path):
    """The end of a script cannot write it, since that takes all ranks; but it is not lost in silence."""
    done = subprocess.run([sys.executable, "-c", LOST, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, lost in {"lost": True, "closed": False, "saved": False, "later": True}.items():
        assert (f"not written to {tmp_path / name}: call trainer.close()" in done.stderr) == lost, done.stderr
        assert (tmp_path / name / get_trace_file_name(0)).exists() == (name != "lost")


@pytest.mark.parametrize("pipe", [1, 2])
def test_activations_are_those_of_the_dry_run(tmp_path, pipe):
    """Followed from what actions take and give; counted from what is there, also in messages under way."""
    case = CASES["mlp"]
    x, y = case.batch(np.random.default_rng(0), 4)
    options = {"microbatches": 2, "mesh": Mesh(pipe=pipe), "optimizer": fsdpx.optim.AdamW()}
    options |= {"precision": "float64", "group_bytes": 2048}

    def run(comm):
        trainer = make(comm, "mlp", trace=tmp_path, **options)
        trainer.step(x, y)
        trainer.step(x, y)
        return trainer.report().high_water["activations"][1]

    dry = [fsdpx.dry_run(case.model(), x, y, ranks=2, rank=r, loss=case.loss, **options) for r in range(2)]
    assert spawn(run, 2) == [one.activations for one in dry]


# -- clocks ------------------------------------------------------------------------------------------------------------


def test_clocks_are_within_the_bound_that_is_said():
    """Threads share one clock: what is found between them is error, and no more than was said."""
    for reading in spawn(measure_clock_offset, 3):
        assert abs(reading.offset) <= reading.error < 1.0


@pytest.mark.world
def test_clocks_of_processes_are_within_the_bound(world):
    """Processes of one host share one as well."""
    reading = measure_clock_offset(world)
    assert abs(reading.offset) <= reading.error < 1.0


def test_other_clocks_are_put_onto_that_of_rank_0():
    """A clock that is 100 s ahead and goes 1 % fast."""
    clock = [ClockReading(0.0 + 100, 100.0, 1e-6), ClockReading(10.1 + 100, 100.1, 3e-6)]
    one = RankTrace(chrome.TraceHeader(1, 2, "", {}, "", 100.0, clock), [])
    assert one.to_rank0_clock(0.0) == pytest.approx(0.0)
    assert one.to_rank0_clock(5.05) == pytest.approx(5.0)
    assert one.clock_error == 3e-6
    assert interpolate_offset(clock[:1], 50.0) == 100.0


# -- waiting -----------------------------------------------------------------------------------------------------------


class Slow(Same):
    """Takes its time on one rank."""

    def forward(self, env, p, x):
        time.sleep(0.4 * (env.mesh.data.rank == 1))  # a busy machine stops a thread for less
        return x, ()


def test_who_waits_for_a_slow_rank_knows_for_which_transfer(tmp_path):
    def run(comm):
        model = nn.Sequential(nn.Linear(8, 8), Slow(), nn.Linear(8, 4))
        trainer = distributed(model, comm, group_bytes=0, trace=tmp_path)
        x = np.ones((2, 8), np.float32)
        for _ in range(2):
            trainer.step(x, np.ones((2, 4), np.float32))
        record = find_timeline_recorder(trainer.inspect.engine).records[-1]
        events = chrome.convert_program_record_to_events(record, TraceGroups.from_axes(trainer.inspect.placement.axes))
        meeting = [e for e in events if VERBS[e.action.op].moves and e.end - e.start > 0.3]
        waits = [wait for wait in chrome.list_wait_events(record, events) if wait.end - wait.start > 0.3]
        return {str(wait.action) for wait in waits}, {str(e.action) for e in meeting}, [w.key for w in waits]

    (waits, meeting, keys), (others, _, _) = spawn(run, 2)
    assert waits
    assert waits <= meeting
    assert None not in keys
    assert not others


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_missing_and_damaged_files_are_named(tmp_path):
    words, one = ["trace", "merge", str(tmp_path)], tmp_path / get_trace_file_name(1)
    assert "there is no rank-*.json.gz; run with --trace, FSDPX_TRACE or distribute(trace=...)" in refused(words)
    spawn(lambda comm: trained(comm, tmp_path, 1, "mlp").close(), 3)
    assert str(tmp_path / chrome.MERGED) in shown(words)
    one.unlink()
    assert "of 3 ranks the files of 1 are missing" in refused(words)
    one.write_bytes(b"damaged")
    assert f"{one}: no trace of fsdpx can be read there" in refused(words)


def test_choices_that_do_not_fit_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"trace='.*file/x': .*ENOTDIR"):
        spawn(lambda comm: make(comm, "mlp", trace=tmp_path / "file" / "x"), 2)
    with pytest.raises(ConfigError, match=r"TraceConfig\(steps=0\): a whole number, 1 or more"):
        TraceConfig(tmp_path, steps=0)
    with pytest.raises(ConfigError, match=r"trace=3: a folder, or fsdpx\.Trace"):
        spawn(lambda comm: make(comm, "mlp", trace=3), 1)
    with pytest.raises(ConfigError, match="elastic ranks come and go, but a trace needs fixed ranks"):
        spawn(lambda comm: make(comm, "mlp", trace=tmp_path, elastic=ElasticConfig()), 1)
    with pytest.raises(ConfigError, match="ranks differ in trace: rank 0 has None, rank 1 has"):
        spawn(lambda comm: make(comm, "mlp", trace=tmp_path if comm.rank else None), 2)


def test_saving_and_loading_are_slices_of_a_trace(tmp_path):
    """Before, between and behind the steps, with the bytes written, and the bytes read: each rank's share of what is
    verified, and its part."""
    moved = [0, 0]

    def run(comm):
        trainer = trained(comm, tmp_path / "trace", steps=1, case="mlp")
        trainer.save(tmp_path / "one")
        trainer.predict(CASES["mlp"].batch(np.random.default_rng(0), 2)[0])  # a program that leaves no record
        trainer.step(*own_part(trainer.data_group, "mlp", 8))
        trainer.load(tmp_path / "one")
        trainer.close()

    spawn(run, 2)
    for rank in read_traces(tmp_path / "trace"):
        slices = [e for e in rank.events if e["ph"] == "X"]
        found = {e["name"]: e for e in slices if e["cat"] == "outside" and "batches" not in e["name"]}
        assert list(found) == ["(saving a checkpoint)", "(loading weights)"]
        saved, loaded = found.values()
        moved = [total + one["args"]["bytes"] for total, one in zip(moved, (saved, loaded), strict=True)]
        first, second = (e for e in slices if e["cat"] == "step")
        assert first["ts"] + first["dur"] <= saved["ts"] <= saved["ts"] + saved["dur"] <= second["ts"]
        assert second["ts"] + second["dur"] <= loaded["ts"]
    assert moved[1] == 2 * moved[0] > 0
