"""What another user plants where fsdpx looks is neither believed nor run, ends no process and holds none."""

import gzip
import json
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fsdpx.__main__ import main as command_line
from fsdpx.core.base import safe_files
from fsdpx.core.base.environment import Environment, LauncherInfo
from fsdpx.core.base.messages import format_table
from fsdpx.core.checkpoint.atomic_commit import _lock_checkpoint
from fsdpx.core.checkpoint.read import open_weights
from fsdpx.core.comm.mpi import mpi_init_watchdog, start
from fsdpx.core.trainer.fit_checkpoints import FitHistory
from fsdpx.errors import CheckpointError, ConfigError, LaunchError, OffloadError
from fsdpx.ext.observe import chrome
from fsdpx.ext.observe.chrome import TraceHeader, merge_traces
from fsdpx.ext.observe.folder import RunFolder
from fsdpx.ext.observe.html_page import write_report_page
from fsdpx.ext.observe.log import TrainingLog
from fsdpx.ext.observe.measure import ClockReading
from fsdpx.ext.offload.disk import lock_folder
from fsdpx.ext.watch.flight_recorder import FlightRecorder, read_all_records, read_record
from fsdpx.launch import python_api
from fsdpx.launch import run as start_of_jobs
from fsdpx.launch.elastic_join import JoinRequests
from fsdpx.launch.launchers import FoundLauncher
from fsdpx.launch.rank_status import LogFollower, RankStatus, read_rank_statuses, redirect_output_to_log
from fsdpx.launch.run import _make_temporary_folder_and_remove_dead, _recreate_private_folder
from fsdpx.models import pretrained_writer
from fsdpx.models.generation.terminal import TerminalStream

pytestmark = pytest.mark.skipif(os.name != "posix", reason="there are no owners and modes")
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be another user")
OTHER = 65534


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file that attacks would overwrite; it stays as it is."""
    path = tmp_path / "victim"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"


@pytest.fixture
def innocent() -> Iterator[subprocess.Popen[bytes]]:
    """A process that attacks would kill; it lives on."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    assert process.poll() is None
    process.communicate(b"\n")


# -- the start of MPI -------------------------------------------------------------------------------------------------


def test_a_start_in_a_folder_that_others_can_enter_leaves_no_mark(tmp_path, monkeypatch, victim):
    launcher = LauncherInfo("mpiexec", 2, 0, 0, 2, "PMI_RANK")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(start.environment, "read_environment", lambda: Environment(launcher=launcher, expected_size=2))
    monkeypatch.setattr(start, "get_running_mpi", lambda: None)
    monkeypatch.setattr(start, "_identify_job", lambda _: "77-1")
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a clock was started"))
    folder = tmp_path / "fsdpx-start-77-1"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "came-00000").symlink_to(victim)
    with (
        pytest.warns(RuntimeWarning, match=f"^fsdpx: {folder} can be entered by others .mode 0777.; it is ignored$"),
        start.guarding_mpi_start(),
    ):
        assert sorted(os.listdir(folder)) == ["came-00000"]
    assert folder.exists()


def test_a_clock_kills_only_the_very_process_that_a_mark_of_a_private_folder_names(tmp_path, innocent):
    folder, birth = tmp_path / "start", mpi_init_watchdog.get_process_start_time(innocent.pid)
    folder.mkdir(mode=0o700)
    names = [f"came-00001.{innocent.pid}-1.0", f"came-1.{innocent.pid}.0", "came-x", f"came-00002.-{birth}.0", "came-"]
    for name in names:
        (folder / name).touch()
    os.mkfifo(folder / "came-00003")
    (folder / "came-00004").symlink_to("/dev/zero")
    assert mpi_init_watchdog.find_waiting_ranks(str(folder)) == {}
    (folder / f"came-00005.{innocent.pid}-{birth}.0").touch()
    assert mpi_init_watchdog.find_waiting_ranks(str(folder)) == {5: (f"{innocent.pid}-{birth}", "0")}
    (tmp_path / "link").symlink_to(folder)
    assert mpi_init_watchdog.find_waiting_ranks(str(tmp_path / "link")) == {}
    folder.chmod(0o711)
    assert mpi_init_watchdog.find_waiting_ranks(str(folder)) == {}
    mpi_init_watchdog.kill_waiting_ranks({1: (f"{innocent.pid}-1", "0")}, f"{innocent.pid}-1")
    mpi_init_watchdog._send_signal_if_alive(f"{innocent.pid}-", signal.SIGKILL)


@as_root
def test_a_clock_believes_no_folder_of_another_user(tmp_path: Path, innocent: subprocess.Popen[bytes]) -> None:
    folder, birth = tmp_path / "start", mpi_init_watchdog.get_process_start_time(innocent.pid)
    folder.mkdir(mode=0o700)
    (folder / f"came-00001.{innocent.pid}-{birth}.0").touch()
    os.chown(folder, OTHER, OTHER)
    assert mpi_init_watchdog.find_waiting_ranks(str(folder)) == {}


def test_the_mark_of_a_start_that_was_ended_follows_no_link(tmp_path: Path, victim: Path) -> None:
    folder = tmp_path / "start-host"
    folder.mkdir(mode=0o700)
    (folder / mpi_init_watchdog.TIMED_OUT_MARK).symlink_to(tmp_path / "new")
    waiting = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (folder / f"came-00000.{waiting.pid}-{mpi_init_watchdog.get_process_start_time(waiting.pid)}.0").touch()
    command = [sys.executable, "-I", "-S", mpi_init_watchdog.__file__, str(folder), "0", "0", "2", "2", "keep"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert "rank 1 of 2 has not come to the start of MPI within 0 s" in done.stderr or "not all ranks" in done.stderr
    waiting.communicate(timeout=60)
    assert waiting.returncode == -signal.SIGKILL
    assert not (tmp_path / "new").exists()


# -- records, notes, requests, logs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o002])
def test_a_flight_record_is_its_users_alone_whatever_the_umask(tmp_path: Path, umask: int, victim: Path) -> None:
    before = os.umask(umask)
    try:
        folder = safe_files.make_folder(tmp_path / "flight")
        (folder / "rank-00000.flight").symlink_to(victim)
        FlightRecorder(folder / "rank-00000.flight", 0, 2, "n1").record_end(3)
        RankStatus(0, 1, "n1").write_to_folder(tmp_path / "run")
    finally:
        os.umask(before)
    for path in (folder / "rank-00000.flight", tmp_path / "run" / "rank-00000.json"):
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_forged_flight_record_ends_nothing(tmp_path: Path) -> None:
    FlightRecorder(tmp_path / "rank-00000.flight", 0, 2, "n1").record_end(3)
    assert read_all_records(tmp_path)[0].exit_status == 3
    (tmp_path / "rank-00000.flight").chmod(0o660)
    with pytest.warns(RuntimeWarning, match=r"can be written by others \(mode 0660\); it is ignored"):
        assert read_all_records(tmp_path) == {}
    os.mkfifo(tmp_path / "rank-00001.flight")
    (tmp_path / "rank-00002.flight").symlink_to("/dev/zero")
    assert read_record(tmp_path / "rank-00001.flight") is read_record(tmp_path / "rank-00002.flight") is None


def test_notes_that_are_none_are_passed_over(tmp_path: Path) -> None:
    RankStatus(0, 7, "n1", 3, "ValueError").write_to_folder(safe_files.make_folder(tmp_path / "run"))
    good = (tmp_path / "run" / "rank-00000.json").read_text()
    bad = ["", "[" * 9999, "3", "{}", good.replace("7", '"7"'), good.replace("}", ', "x": 1}')]
    for number, text in enumerate(bad, 1):
        safe_files.write_file(tmp_path / "run" / f"rank-{number:05}.json", text)
    os.mkfifo(tmp_path / "run" / "rank-00008.json")
    (tmp_path / "run" / "rank-00009.json").symlink_to("/dev/zero")
    with pytest.warns(RuntimeWarning, match="rank-00001.json: .*; it is ignored$") as warned:
        assert read_rank_statuses(tmp_path / "run") == {0: RankStatus(0, 7, "n1", 3, "ValueError")}
    assert len(warned) == 1


def test_requests_to_join_that_are_none_do_not_end_or_hold_the_launcher(tmp_path, monkeypatch, victim):
    asked: list[int] = []
    (tmp_path / "joins-left").mkdir()
    guests = JoinRequests(tmp_path, asked.append)
    monkeypatch.setattr("fsdpx.launch.elastic_join._find_process_handling_save_signal", lambda _: os.getpid())
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a process was signalled"))
    for name, text in (("a", "garbage"), ("b", "-3"), ("c", "9" * 5000), ("d", "1")):
        safe_files.write_file(tmp_path / f"joins-{name}", text)
    (tmp_path / "joins-d").chmod(0o666)
    os.mkfifo(tmp_path / "joins-fifo")
    (tmp_path / "joins-zero").symlink_to("/dev/zero")
    (tmp_path / "answer-a").symlink_to(victim)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        guests.answer_and_request_save(tmp_path)
        guests.refuse_open_requests()
    assert asked == []
    assert len(said) == 1
    for name in "abc":
        assert (tmp_path / f"answer-{name}").read_text().endswith("is no number of ranks")


def test_logs_follow_no_link_and_nothing_in_their_folder_holds_the_launcher(tmp_path, victim, capsys):
    (tmp_path / "rank-0000.log").symlink_to(victim)
    with pytest.raises(safe_files.Untrusted, match="is a link, which is not followed here"):
        redirect_output_to_log(tmp_path, 0)
    os.mkfifo(tmp_path / "rank-0001.log")
    (tmp_path / "rank-none.log").touch()
    (tmp_path / "rank-0002.json").symlink_to(victim)
    follower = LogFollower(tmp_path)
    safe_files.write_file(tmp_path / "rank-0003.log", "a line\n")
    with pytest.warns(RuntimeWarning, match="it is ignored"):
        follower._print_new_lines()
    follower.stop_and_write_rank_statuses({2: "{}"})
    assert "[3] a line\n" in capsys.readouterr().out


@as_root
def test_folders_of_another_user_are_neither_used_nor_removed(tmp_path: Path) -> None:
    for name in ("start-0", "fsdpx-run-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "owner").write_text("1-1")
        os.chown(tmp_path / name, OTHER, OTHER)
    words = r"start-0 belongs to user 65534, .*: name a --folder in which no other user can"
    with pytest.raises(LaunchError, match=words):
        _recreate_private_folder(tmp_path / "start-0")
    (tmp_path / "fsdpx-run-y").symlink_to(tmp_path / "start-0")
    assert _make_temporary_folder_and_remove_dead(tmp_path).exists()
    assert all((tmp_path / name / "owner").exists() for name in ("start-0", "fsdpx-run-x", "fsdpx-run-y"))


# -- locks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("locked", "name", "error"),
    [
        (lambda folder: lock_folder(folder, "a job"), "fsdpx.lock", OffloadError),
        (lambda folder: _lock_checkpoint(folder / "fsdpx"), ".fsdpx-lock-fsdpx", CheckpointError),
    ],
    ids=["offload", "checkpoint"],
)
def test_locks_follow_no_link_and_overwrite_nothing(tmp_path, victim, locked, name, error):
    lock = tmp_path / "folder" / name
    lock.parent.mkdir()
    for plant, why in (
        (lambda: lock.symlink_to(victim), "is a link"),
        (lambda: lock.symlink_to(tmp_path / "new"), "is a link"),
        (lambda: os.link(victim, lock), "is another file's name as well"),
        (lambda: os.mkfifo(lock), "a pipe or a device where a file should be"),
    ):
        plant()
        with pytest.raises(error, match=f"^{lock} .*{why}.*: remove it"):
            locked(lock.parent)
        lock.unlink()
    assert not (tmp_path / "new").exists()
    os.close(locked(lock.parent))


def test_a_log_that_goes_on_follows_no_link(tmp_path: Path, victim: Path) -> None:
    log = TrainingLog(tmp_path, ())
    for name in ("metrics.csv", "metrics.jsonl", "log.txt"):
        (tmp_path / name).symlink_to(victim)
        with pytest.raises(safe_files.Untrusted, match=f"{name} is a link, which is not followed here"):
            log._open_files(None, FitHistory())
        (tmp_path / name).unlink()


def test_a_device_in_place_of_a_file_of_a_model_is_not_even_opened(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").symlink_to(os.devnull)
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(CheckpointError, match="this is a folder, a pipe or a device where a file should be"):
        open_weights(tmp_path)


def test_a_file_beside_a_model_that_becomes_a_link_while_it_is_copied_is_left_out(tmp_path, victim, monkeypatch):
    """Another user swaps it between the look at its name and its opening."""
    beside, opened = tmp_path / "model" / "vocab.txt", safe_files.open_file
    beside.parent.mkdir()
    beside.write_text("a b c")

    def swapped(path: Path, *more: Any, **options: Any) -> Any:
        beside.unlink()
        beside.symlink_to(victim)
        return opened(path, *more, **options)

    monkeypatch.setattr(pretrained_writer, "open_file", swapped)
    with pytest.warns(RuntimeWarning, match="vocab.txt: this is a link out of its folder, and is not copied"):
        pretrained_writer._copy_file_if_trusted(beside, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_the_folder_of_a_run_that_is_started_by_hand_cannot_be_made_before_it(tmp_path, monkeypatch, capsys):
    script = tmp_path / "x.py"
    script.touch()
    monkeypatch.setattr(start_of_jobs, "find_launcher_to_use", lambda config: FoundLauncher(("mpiexec",), None))
    for _ in range(2):
        assert command_line(["run", "-n", "2", "--dry-run", str(script)]) == 0
    names = set(re.findall(r"FSDPX_RUN=(\S+)/start-0", capsys.readouterr().out))
    assert len(names) == 2
    assert all(re.fullmatch(r".*/fsdpx-run-[0-9a-f]{16}", name) for name in names)


def test_a_call_of_another_launch_is_not_run(tmp_path: Path) -> None:
    """Its owner is right: another user has put the folder of an earlier launch in place of this one."""
    safe_files.write_file(tmp_path / python_api._CALL, pickle.dumps(([], b"a call of yesterday")))
    with pytest.raises(LaunchError, match=r"call.pickle is not of this launch: name a folder= where no other user can"):
        python_api.main(tmp_path, python_api._hash_bytes(b"the call of today"))


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_names_that_a_terminal_would_obey_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "w\x1b]0;owned\x07\x9b2J\tx\n"
    shown = "w\\x1b]0;owned\\x07\\x9b2J\tx\n"
    for kind in (ConfigError, OffloadError, LaunchError, CheckpointError):
        assert str(kind(hostile)) == shown
    TerminalStream(lambda _: hostile, lambda text: print(text, end=""))(0, 1)
    assert capsys.readouterr().out == shown
    assert "\x1b" not in format_table([("run", "n"), (hostile, "1")])


def packed(folder: Path, events: Any = (), **header: Any) -> None:
    """A file of rank 0's trace, with some fields of its head otherwise."""
    told = asdict(TraceHeader(0, 1, "", {}, "host", 0.0, [ClockReading(0.0, 0.0, 0.0)])) | header
    content = json.dumps({"traceEvents": list(events), "fsdpx": told})
    (folder / "rank-00000.json.gz").write_bytes(gzip.compress(content.encode()))


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"ranks": 10**15}, "of 1000000000000000 ranks the files of 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 are missing"),
        ({"rank": -1}, "it lacks its rank or its clock readings"),
        ({"rank": 5}, "it lacks its rank or its clock readings"),
        ({"ranks": "1"}, "it lacks its rank or its clock readings"),
        ({"clock": []}, "it lacks its rank or its clock readings"),
        ({"clock": [["x", 0, 0]]}, "no trace of fsdpx can be read there"),
        ({"more": 1}, "no trace of fsdpx can be read there"),
    ],
)
def test_a_trace_of_others_is_read_within_bounds(tmp_path: Path, header: dict[str, Any], why: str) -> None:
    packed(tmp_path, **header)
    with pytest.raises(ConfigError, match=re.escape(why)):
        merge_traces(tmp_path)


def test_a_trace_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome, "MAX_UNPACKED_BYTES", 1000)
    packed(tmp_path, events=[{}] * 1000)
    with pytest.raises(ConfigError, match="more than 1,000 bytes are packed in it"):
        merge_traces(tmp_path)


@pytest.mark.parametrize("events", [[7], [{"ph": "X"}], [{"ph": "X", "cat": "layer", "name": 7, "ts": 0, "dur": "x"}]])
def test_a_page_of_what_others_have_written_is_made_or_refused_in_words(tmp_path: Path, events: list[Any]) -> None:
    packed(tmp_path, events=events, shown=1)
    with pytest.raises(ConfigError, match=f"{tmp_path}: its content is not what fsdpx writes"):
        write_report_page(RunFolder(tmp_path))


def test_names_in_a_page_are_text(tmp_path: Path) -> None:
    hostile = "</title><script>alert(1)</script><img src=x onerror='a()' \"&"
    slices = [("step", "step 1"), ("compute", "F0"), ("layer", f"{hostile} forward"), ("wait", hostile)]
    more = {"run": 1, "key": hostile, "stops": True}
    events = [{"ph": "X", "cat": cat, "name": name, "ts": 0.0, "dur": 9.0, "args": more} for cat, name in slices]
    packed(tmp_path, events=events, shown=1, host=hostile, mesh=hostile, version=hostile)
    folder = RunFolder(tmp_path)
    write_report_page(folder)
    text = folder.page_path.read_text()
    assert text.count("&lt;script&gt;") > 3
    assert "<script" not in text
    assert "<img src=x" not in text
