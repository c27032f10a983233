"""What killed jobs leave behind: the next start removes what is ours, `info` names what is MPI's."""

import mmap
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from commands import shown
from trials import MPIEXEC, STEPS, TRAINER, alive_in, environment, job, none_left

from fsdpx.core.base import safe_files
from fsdpx.core.comm.mpi.start import find_leftover_files, identify_process, is_process_alive, remove_leftover_files
from fsdpx.ext.watch.flight_recorder import FlightRecorder
from fsdpx.ext.watch.watchdog import _choose_record_folder_and_remove_dead_ones
from fsdpx.launch.info import _describe_cache
from fsdpx.launch.run import _make_temporary_folder_and_remove_dead

WAITS = """
shared = [line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "/dev/shm/" in line]
open(f"shared-{comm.rank}", "w").write("\\n".join(shared))
os.rename(f"shared-{comm.rank}", f"ready-{comm.rank}")
time.sleep(100)
"""


def ended() -> int:
    """The number of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def record(folder: Path, process: int, host: str) -> Path:
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: process)
        FlightRecorder(folder / "rank-00000.flight", 0, 2, host)
    return folder


def test_records_go_when_all_who_wrote_them_are_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, here = ended(), platform.node()
    gone = record(tmp_path / "fsdpx-flight-dead", dead, here)
    kept = [
        record(tmp_path / "fsdpx-flight-lives", os.getpid(), here),
        record(tmp_path / "fsdpx-flight-elsewhere", dead, "another-host"),
        record(tmp_path / "not-ours", dead, here),
    ]
    (tmp_path / "fsdpx-flight-begins").mkdir()
    for folder in (gone, *kept):
        os.utime(folder, (0, 0))  # a job may run for long
    assert _choose_record_folder_and_remove_dead_ones("new", "") == tmp_path / "fsdpx-flight-new"
    assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / "fsdpx-flight-begins"])


def test_records_that_go_meanwhile_are_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job on the host ends while this one looks at what is left of jobs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ends, glob = record(tmp_path / "fsdpx-flight-ends", os.getpid(), platform.node()), Path.glob

    def late(path, pattern):
        if path == ends:
            (ends / "rank-00000.flight").unlink(missing_ok=True)
            ends.rmdir()
            os.scandir(path)  # an error, as the glob of Python 3.11 then has
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", late)
    assert _choose_record_folder_and_remove_dead_ones("new", "") == tmp_path / "fsdpx-flight-new"
    assert not ends.exists()


def test_a_starter_that_ends_meanwhile_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fsdpx-run-ends").mkdir()
    (tmp_path / "fsdpx-run-ends" / "owner").write_text(identify_process())

    def late(path: Path) -> bool:
        (path / "owner").unlink()
        return True

    monkeypatch.setattr(safe_files, "is_user_owned_folder", late)
    assert (_make_temporary_folder_and_remove_dead(tmp_path) / "owner").read_text() == identify_process()


def test_folders_of_killed_starters_go_and_records_that_were_kept_stay(tmp_path: Path) -> None:
    for name, said in (("killed", f"{ended()}-1"), ("lives", identify_process()), ("kept", None)):
        (tmp_path / f"fsdpx-run-{name}").mkdir()
        if said is not None:
            (tmp_path / f"fsdpx-run-{name}" / "owner").write_text(said)
    made = _make_temporary_folder_and_remove_dead(tmp_path)
    assert (made / "owner").read_text() == identify_process()
    assert {path.name for path in tmp_path.iterdir()} == {"fsdpx-run-lives", "fsdpx-run-kept", made.name}


def test_who_lives() -> None:
    assert is_process_alive(identify_process())
    assert not is_process_alive(f"{os.getpid()}-1")  # another process had this number once
    assert not is_process_alive(str(ended()))
    assert is_process_alive("somebody")


def test_what_is_mpis_is_found_unless_it_is_in_use(tmp_path: Path) -> None:
    for name in ("mpich_shm_1f_0", "mpich_shm_2f_0", "sm_segment.n1.0.1", "someone_elses"):
        (tmp_path / name).write_bytes(bytes(4096))
    with (tmp_path / "mpich_shm_2f_0").open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        found = [path.name for path in find_leftover_files(tmp_path, 0.0)]
    assert found == ["mpich_shm_1f_0", "sm_segment.n1.0.1"]
    assert find_leftover_files(tmp_path) == []  # they are new
    assert len(find_leftover_files(tmp_path, 0.0)) == 3


def test_the_next_start_removes_what_is_mpichs_and_old_and_in_no_use(tmp_path: Path) -> None:
    for name in ("mpich_shm_1f_0", "mpich_vci_1f_0", "mpich_shm_2f_0", "mpich_shm_3f_0", "sm_segment.n1.0.1"):
        (tmp_path / name).write_bytes(bytes(4096))
        os.utime(tmp_path / name, (0, 0))
    long_ago = time.time() - 300  # a start may be given some minutes
    os.utime(tmp_path / "mpich_shm_3f_0", (long_ago, long_ago))
    with (tmp_path / "mpich_shm_2f_0").open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        remove_leftover_files(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"mpich_shm_2f_0", "mpich_shm_3f_0", "sm_segment.n1.0.1"}


def test_the_next_start_removes_sessions_of_open_mpi_that_are_old_and_in_no_use(tmp_path: Path) -> None:
    dead = [ended() for _ in range(3)]
    names = [f"ompi.{dead[0]}", f"ompi.{os.getpid()}", f"ompi.{dead[1]}", f"ompi.{dead[2]}", "ompi.host.0"]
    gone, lives_on, mapped, new, other = folders = [tmp_path / name for name in names]
    for folder in folders:
        (folder / "1").mkdir(parents=True)
        (folder / "hwloc.sm").write_bytes(bytes(4096))
        if folder != new:
            os.utime(folder, (0, 0))
    with (mapped / "hwloc.sm").open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        remove_leftover_files(tmp_path / "shm", tmp_path)
    assert set(tmp_path.iterdir()) == {lives_on, mapped, new, other}
    assert not gone.exists()


def test_names_of_windows_are_listed_and_the_next_start_removes_them(tmp_path: Path) -> None:
    killed, new = safe_files.make_temporary_path(tmp_path), safe_files.make_temporary_path(tmp_path)
    other = tmp_path / "fsdpx-acache00"
    for path in (killed, new, other):
        path.touch()
    for path in (killed, other):
        os.utime(path, (0, 0))
    assert find_leftover_files(tmp_path) == [killed]
    remove_leftover_files(tmp_path, tmp_path)
    assert set(tmp_path.iterdir()) == {new, other}


def test_nothing_is_printed_where_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty line would be a name for xargs."""
    monkeypatch.setattr("fsdpx.launch.info.find_leftover_files", list)
    assert shown("info --left") == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_root_sees_only_its_own_files(tmp_path: Path) -> None:
    for name, owner in (("mpich_shm_a", 0), ("mpich_shm_b", 65534)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
        os.chown(tmp_path / name, owner, owner)
    assert find_leftover_files(tmp_path) == [tmp_path / "mpich_shm_a"]
    assert "belong to this user (as root: only root's)" in " ".join(shown("info --help").split())


def test_info_describes_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDPX_CACHE", str(tmp_path))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "x.code").write_bytes(bytes(2048))
    assert _describe_cache() == f"{tmp_path}; 1 file, 2.00 KiB"
    with monkeypatch.context() as patch:  # another job removes its lock while this one lists the folder
        patch.setattr("os.walk", lambda folder: [(str(tmp_path / "code"), [], ["x.code", "y.lock"])])
        assert _describe_cache() == f"{tmp_path}; 1 file, 2.00 KiB"
    (tmp_path / "file").touch()
    monkeypatch.setenv("FSDPX_CACHE", str(tmp_path / "file" / "below"))
    assert _describe_cache() == f"{tmp_path / 'file' / 'below'}, which this user cannot write; 0 files, 0 B"


def test_what_is_mpis_may_go_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(path: Path) -> bool:
        path.unlink()
        return True

    (tmp_path / "mpich_shm_1f_0").write_bytes(b"x")
    monkeypatch.setattr("fsdpx.core.comm.mpi.start.is_owned_by_user", late)
    assert find_leftover_files(tmp_path, -10.0) == []


@pytest.mark.jobs
def test_a_job_that_is_killed_and_the_next_one(tmp_path: Path) -> None:
    """All its processes at once, the launcher's as well."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    (tmp_path / "job.py").write_text(TRAINER + WAITS)
    killed = subprocess.Popen(
        [str(MPIEXEC), "-n", "2", sys.executable, "job.py"],
        cwd=tmp_path, env=environment(TMPDIR=str(temporary)), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert killed.poll() is None
        time.sleep(0.02)
    for process in alive_in(tmp_path):
        os.kill(process, signal.SIGKILL)
    killed.wait()
    assert none_left(tmp_path)
    assert list(temporary.glob("fsdpx-flight-*/rank-*.flight"))
    shared = {Path(line) for ready in tmp_path.glob("ready-*") for line in ready.read_text().splitlines()}
    ours = [path for path in find_leftover_files(seconds=0.0) if path in shared]
    assert len(ours) == len([path for path in shared if path.exists()])
    if ours:  # an MPI library may have removed their names while they were in use
        subprocess.run(["xargs", "rm"], input="\n".join(map(str, ours)), text=True, check=True)
    done = job(tmp_path, TRAINER + "outside = lambda step: None\n" + STEPS, ranks=2)
    assert done.status == 0, done.err
    assert list(temporary.glob("fsdpx-*")) == []
