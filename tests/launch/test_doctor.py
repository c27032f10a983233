"""python -m fsdpx doctor and bench: what they find and measure."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from commands import shown
from stand_in import Cupy, Device
from trials import job

from fsdpx import spawn
from fsdpx.errors import install_hint
from fsdpx.launch.bench import TIMED_VERBS, _format_report, _iterate_communicators_to_measure, measure_verbs
from fsdpx.launch.doctor import RankFacts, gather_health_report_of_ranks, list_warnings
from fsdpx.launch.launchers import FoundLauncher

VERSIONS = {"numpy": "2.1", "numba": "0.6"}
GOOD = RankFacts("n1", VERSIONS, (0, 1), 1, 1 << 30, "/cache", True, (), False)


def test_without_a_gpu_and_alone() -> None:
    text = shown("doctor")
    assert "host arrays  local: one rank by itself" in text
    assert "cupy" not in text.lower()
    assert ("GPUs         none\n" in text) != os.path.exists("/dev/nvidiactl")
    assert "GPU arrays" not in text
    assert "all-reduce   4.00 MiB: " in text
    assert ", the sum is right" in text


NO_SSH = """
--------------------------------------------------------------------------
The value of the MCA parameter "plm_rsh_agent" was set to a path
that could not be found:

  plm_rsh_agent: ssh : rsh
--------------------------------------------------------------------------
"""
AS_ROOT = "mpirun has detected an attempt to run as root."


@pytest.mark.skipif(sys.platform == "win32", reason="the launcher is a script of sh")
@pytest.mark.parametrize(
    ("said", "status", "found"),
    [
        (NO_SSH, 213, r'plm_rsh_agent" was .* ssh : rsh; Open MPI wants ssh even .* OMPI_MCA_plm_ssh_agent=false, of '),
        (AS_ROOT, 1, r"to run as root\.; set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
        ("", 7, "status 7$"),
        ("", 0, ""),
    ],
)
def test_a_launcher_that_starts_nothing_is_quoted(said, status, found, tmp_path, monkeypatch):
    """In the words of Open MPI 4; it is none of the test's processes that fails."""
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text(f"#!/bin/sh\ncat >&2 <<.\n{said}\n.\nexit {status}\n")
    mpiexec.chmod(0o700)
    monkeypatch.setattr(
        "fsdpx.launch.launchers.find_launcher_to_use", lambda config: FoundLauncher((str(mpiexec),), None)
    )
    (comm,) = spawn(lambda comm: comm, 1)
    rows = gather_health_report_of_ranks(comm)[1]
    warnings = [text for topic, text in rows if topic == "warning" and "starts no ranks" in text]
    assert len(warnings) == bool(status)
    assert not status or re.match(rf"{re.escape(str(tmp_path))}/mpiexec starts no ranks here: .*{found}", warnings[0])


def test_two_ranks_on_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in Cupy(gpus=2).modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    Device(0).use()
    healthy, rows = spawn(gather_health_report_of_ranks, 2)[0]
    found = dict(rows)
    assert re.fullmatch(r"rank 1: GPU 0 \(0000:01:00\.0\) of \S+", found["GPU"])  # threads of a process share its GPU
    assert "cupy 14.2.0" in found["versions"]
    assert found["host arrays"].startswith("local: ")
    assert found["GPU arrays"] == "staged through the host"
    assert ("warning", "ranks 0, 1 share a GPU: start one rank per GPU, or name them by device_map") in rows
    assert healthy


def test_sums_that_are_wrong_are_seen() -> None:
    def body(comm):
        reduce = comm.all_reduce

        def wrong(buf, **options):
            handle = reduce(buf, **options)
            handle.wait()
            buf[-1] += comm.rank
            return handle

        comm.all_reduce = wrong
        return gather_health_report_of_ranks(comm)

    healthy, rows = spawn(body, 3)[0]
    assert not healthy
    assert all("the sum is WRONG on ranks 1, 2" in text for name, text in rows if name == "all-reduce")


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([GOOD, GOOD._replace(load=4.2)], "n1: 4.2 processes per core want to run: times measured now are unreliable"),
        ([GOOD._replace(threads=2)] * 2,
         "n1: 4 threads of 2 ranks on 2 cores: set OMP_NUM_THREADS to 1, or start at most 2 ranks"),
        ([GOOD._replace(free=1 << 20)] * 2,
         "n1: 1.00 MiB of shared memory are free: docker run --shm-size=8g, or FSDPX_NODE=0"),
        ([GOOD._replace(driver=True)],
         f"n1 has an NVIDIA driver, but CuPy sees no GPU: {install_hint('cuda13')}, and look at CUDA_VISIBLE_DEVICES"),
        ([GOOD, GOOD._replace(versions={**VERSIONS, "numpy": "2.0"})],
         "rank 1 on n1 has numpy 2.0, rank 0 has other versions: use one environment"),
        ([GOOD._replace(writable=False)],
         "rank 0 on n1 cannot write /cache: set FSDPX_CACHE, else each job compiles again"),
        ([GOOD._replace(versions={**VERSIONS, "numba": "not installed"})],
         "Numba is not installed: kernels are several times slower; pip install numba"),
    ],
    ids=["load", "threads", "memory", "GPU", "versions", "cache", "Numba"],
)  # fmt: skip
def test_warnings_have_remedies(ranks: list[RankFacts], said: str) -> None:
    assert list_warnings(ranks, []) == [said]


def test_no_warning_without_a_reason() -> None:
    assert list_warnings([GOOD, GOOD], []) == list_warnings([GOOD._replace(load=0.4)], []) == []


@pytest.mark.parametrize("driver", [False, True])
def test_cupy_is_asked_for_only_where_there_is_a_gpu(driver: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = GOOD._replace(versions={**VERSIONS, "torch": "not installed", "cupy": "not installed"}, driver=driver)
    monkeypatch.setattr("fsdpx.launch.doctor._collect_rank_facts", lambda: facts)
    monkeypatch.setattr("fsdpx.launch.doctor.try_launcher_and_explain_failure", str)
    monkeypatch.setitem(sys.modules, "cupy", None)
    (comm,) = spawn(lambda comm: comm, 1)
    found = dict(gather_health_report_of_ranks(comm)[1])
    assert "not installed" not in found["versions"]
    assert ("needs CuPy" in found["GPUs"], found["GPUs"] == "none") == (driver, not driver)
    assert ("pip install '.[cuda13]'" in found.get("warning", "")) == driver


def test_every_verb_has_its_time_and_what_it_moved() -> None:
    reports = spawn(lambda comm: measure_verbs(comm, [64, 30_000], seconds=0.0), 3)
    assert reports[0] == reports[1] == reports[2]
    json.dumps(reports[0])
    (level,) = reports[0]["levels"]
    assert (level["level"], level["ranks"]) == ("all ranks", 3)
    rows = {(row["verb"], row["bytes"]): row for row in level["rows"]}
    verbs = [verb for verb in TIMED_VERBS if verb != "barrier"]
    assert set(rows) == {("barrier", 0), *((verb, size) for verb in verbs for size in (72, 30_000))}
    assert all(row["seconds"] > 0 and row["by"] == "threads" and row["raw_seconds"] is None for row in rows.values())
    shares = {verb: rows[verb, 30_000]["bus_bandwidth"] / rows[verb, 30_000]["bandwidth"] for verb in verbs}
    moved = {"send": 1, "broadcast": 1, "reduce": 1, "all_reduce": 4 / 3, "all_reduce ring": 4 / 3}
    assert shares == pytest.approx({verb: moved.get(verb, 2 / 3) for verb in shares})
    assert level["latency"] == rows["send", 72]["seconds"]
    assert level["bandwidth"] == max(rows["send", size]["bandwidth"] for size in (72, 30_000))
    text = _format_report(reports[0])
    assert "all ranks, 3 ranks; a message takes " in text
    printed = [line.split()[0] for line in text.splitlines() if line.endswith(" threads")]
    assert printed == [row["verb"].split()[0] for row in level["rows"]]


def test_the_levels_are_those_of_the_machine() -> None:
    def run(hosts):
        def sizes(comm):
            groups = _iterate_communicators_to_measure(comm, hosts)
            return [(name, group.size if group is not None else 0) for name, group in groups]

        return spawn(sizes, sum(map(len, hosts.values())))

    inside, between, whole = "inside a host", "between hosts", "all ranks"
    assert run({"n1": [0, 1]}) == [[(whole, 2)]] * 2
    assert run({"n1": [0], "n2": [1]}) == [[(whole, 2)]] * 2
    first, other = [(inside, 2), (between, 2), (whole, 3)], [(inside, 2), (between, 0), (whole, 3)]
    assert run({"n1": [0, 1], "n2": [2]}) == [first, other, [(inside, 0), (between, 2), (whole, 3)]]


BOTH = """
import fsdpx
from fsdpx.__main__ import main
assert main(["doctor", "--json"]) == 0
fsdpx.finalize()
words = ["--sizes", "64,64KiB", "--seconds", "0.002", "--json", "found.json"]
assert main(["bench", "comm", *words]) == 0
"""


@pytest.mark.jobs
@pytest.mark.parametrize("messages", [False, True])
def test_both_under_mpiexec(tmp_path: Path, messages: bool) -> None:
    done = job(tmp_path, BOTH, ranks=2, **({"FSDPX_NODE": "0"} if messages else {}))
    assert done.status == 0, done.err
    health, end = json.JSONDecoder().raw_decode(done.out)
    found = dict(health["found"])
    assert health["healthy"]
    assert found["ranks"].startswith("2: ranks 0, 1 on ")
    assert re.search(r", thread level MULTIPLE; /\S+: ", found["MPI"])
    assert found["host arrays"].startswith("mpi: messages only" if messages else "node: shared memory, 2 ranks on one ")
    assert [text.endswith("the sum is right") for name, text in health["found"] if name == "all-reduce"] == [True] * 2

    report = json.loads((tmp_path / "found.json").read_text())
    assert report["backend"] == ("mpi" if messages else "node")
    assert done.out[end:].lstrip().startswith(f"{report['backend']}, {report['library']}; ")
    (level,) = report["levels"]
    by = {row["verb"]: row["by"] for row in level["rows"]}
    ours = {
        "shared memory, compiled": {"all_gather", "reduce_scatter", "all_reduce", "barrier"},
        "shared memory": {"broadcast", "all_to_all"},
    }
    for way, verbs in ours.items():
        assert {verb for verb in by if by[verb] == way} == (set() if messages else verbs), way
    assert by["all_reduce ring"] == "ring of MPI messages"
    assert (by["send"], by["gather"]) == ("MPI", "MPI messages")
    assert all(row["raw_seconds"] > 0 for row in level["rows"] if row["verb"] != "all_reduce ring")
