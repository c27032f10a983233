"""The flight record: what is written is what others read, at any number of actions."""

import gc
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.core.comm.calls import get_thread_stack_frames
from fsdpx.ext.watch import flight_recorder
from fsdpx.ext.watch.flight_recorder import MAX_ACTIONS, FlightRecorder, format_records, read_all_records, read_record
from fsdpx.ext.watch.report import format_hang_report, format_long_wait_report, is_wait_report_due
from fsdpx.ext.watch.watchdog import describe_script_line


def recorder(folder: Path, rank: int = 1, ranks: int = 3) -> FlightRecorder:
    return FlightRecorder(folder / f"rank-{rank:05}.flight", rank, ranks, "host")


@settings(max_examples=examples(20))
@given(actions=st.integers(0, 3 * MAX_ACTIONS), open_=st.booleans())
def test_the_last_actions_are_there_in_order(actions, open_):
    with tempfile.TemporaryDirectory() as folder:
        written = recorder(Path(folder))
        for i in range(actions):
            written.on_action_begin(f"F{i}", float(i + 1))
            if not (open_ and i == actions - 1):
                written.on_action_end(None, 0.0, 0.0, i + 1.5, 0, ())
        flight = read_record(Path(folder) / "rank-00001.flight")
        kept = range(max(0, actions - MAX_ACTIONS), actions)
        assert [e.action for e in flight.entries] == [f"F{i}" for i in kept]
        assert [e.end > 0 for e in flight.entries] == [not (open_ and i == actions - 1) for i in kept]
        written.remove_file()


def test_a_record_says_who_where_and_what_for(tmp_path):
    written = recorder(tmp_path)
    written.on_program_begin(SimpleNamespace(kind="step"), SimpleNamespace(steps=7))
    wall, now = time.time() + 0.01, time.perf_counter()
    written.on_action_begin("GATHER1 (page 'ä.weight')", now - 3)
    written.on_wait("GATHER0 (page 'b')")
    flight = read_all_records(tmp_path)[1]
    assert (flight.rank, flight.ranks, flight.step, flight.program, flight.host) == (1, 3, 7, "step", "host")
    where = flight.describe_latest_action(wall)
    assert where.startswith("in action GATHER1 (page 'ä.weight'), needs GATHER0 (page 'b'), for 3.")
    written.on_action_end(None, 0.0, 0.0, now, 0, ())
    found = read_all_records(tmp_path)
    assert found[1].describe_latest_action(wall).startswith("outside any action for 0.0 s, after GATHER1")
    assert "GATHER1 (page 'ä.weight')  needs GATHER0" in format_records(found)


def test_long_names_are_cut_between_letters():
    assert flight_recorder.encode_truncated_utf8("ä" * 100, 111).decode() == "ä" * 55


def test_what_is_no_record_is_not_read(tmp_path):
    (tmp_path / "rank-00000.flight").write_bytes(b"something else")
    assert read_all_records(tmp_path) == {}
    assert read_record(tmp_path / "missing") is None


def test_ranks_that_wait_alike_share_a_line(tmp_path):
    now = time.perf_counter()
    for rank in (0, 1, 2, 4):
        written = recorder(tmp_path, rank, 6)
        written.on_action_begin("SETTLE1 (page 'w')", now - 5)
        waits = f"reduce_scatter of REDUCE1 w on rank {rank} of 6"
        written.record_current_wait(*((now - 4, waits) if rank != 4 else (0.0, "in fsdpx, at train.py:19\n  File x")))
    text = format_hang_report(read_all_records(tmp_path), 6, set(), 3.0, time.time(), "host").splitlines()
    assert text[1].startswith("  ranks 0-2 wait in action SETTLE1 (page 'w') for reduce_scatter of REDUCE1 w, for 4.")
    assert text[2].startswith("  rank 4 is in action SETTLE1 (page 'w'), for 5.")
    assert text[3:] == ["        File x", "  ranks 3, 5: no record on host (ended, or on another host)"]


def test_the_first_word_names_who_waits_and_where_the_others_stand(tmp_path):
    begun = time.perf_counter()
    elsewhere = "outside of fsdpx, at train.py:19 (no progress since 15:08:13)"
    for rank in (0, 1, 2, 4, 5):
        written = recorder(tmp_path, rank, 6)
        written.on_collective_call("step")
        waits = (0.0, elsewhere) if rank in (0, 5) else (begun, f"all_gather on rank {rank} of 6")
        written.record_current_wait(*waits)
        if rank == 4:
            written.record_end(3)
    flights = read_all_records(tmp_path)
    began = flights[1].since
    assert not is_wait_report_due(flights.values(), 0.0, began + 59)
    assert is_wait_report_due(flights.values(), 0.0, began + 60)
    assert not is_wait_report_due(flights.values(), began + 60, began + 900)  # once for each wait
    assert not is_wait_report_due([flights[0], flights[4], flights[5]], 0.0, began + 900)  # none waits: one has ended
    assert format_long_wait_report(flights, 6, 1800.0, began + 60, "host") == (
        "fsdpx watchdog: still waiting after 60 s; the job goes on, and ends if nothing moves for 1800 s\n"
        f"  ranks 0, 5: {elsewhere}\n"
        "  ranks 1-2: waiting outside any action for all_gather, in call 1, step\n"
        "  rank 3: no record on host (ended, or on another host)\n"
        "  rank 4: has come to the end of its script\n"
    )


def test_a_rank_stands_at_the_line_of_the_script_that_called():
    begun, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (begun.set(), go_on.wait()))
    thread.start()
    begun.wait()
    line = sys._getframe().f_lineno
    own = describe_script_line(threading.get_ident(), 0.0)
    assert own.startswith(f"in fsdpx, at {__file__[-150:]}:{line + 1} (no progress")
    assert f":{line - 3} (" in describe_script_line(thread.ident or 0, 0.0)
    go_on.set()
    thread.join()
    assert describe_script_line(thread.ident or 0, 0.0) == ""


def test_nothing_is_collected_while_a_stack_is_followed():
    """What runs in a collection lets other threads go on, and CPython 3.11 crashes where one returns from a frame of
    which the caller is being asked."""
    begun, where, before = [], [], gc.get_threshold()

    def note(phase, info):
        begun.append(sys._getframe(1).f_code.co_name)

    def deep(calls):
        where.extend(get_thread_stack_frames(threading.get_ident()) if not calls else deep(calls - 1) or ())

    gc.callbacks.append(note)
    gc.set_threshold(1, 1, 1)
    try:
        deep(50)
        kept = gc.isenabled()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
    names = [frame.f_code.co_name for frame, _ in where]
    own = "test_nothing_is_collected_while_a_stack_is_followed"
    assert names[:53] == ["get_thread_stack_frames", *["deep"] * 51, own]
    assert kept
    assert "get_thread_stack_frames" not in begun
