"""`doctor` tells what all ranks have, with evidence and remedies, on machines with GPUs and without."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from amount import few
from stand_in import Cupy, Device

from fsdpx import spawn
from fsdpx.__main__ import main
from fsdpx.launch.doctor import RankFacts, diagnose, warnings_of

VERSIONS = {"numpy": "2.1", "numba": "0.6"}
GOOD = RankFacts("n1", VERSIONS, (0, 1), 1, 1 << 30, "/cache", True, (), False)


def test_without_a_gpu_and_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "host arrays  local: one rank by itself" in text
    assert "GPUs         rank 0 on " in text
    assert "GPU arrays" not in text
    assert "all-reduce   4.00 MiB: " in text
    assert ", the sum is right" in text


def test_times_of_a_busy_machine_are_not_to_be_trusted() -> None:
    said = "n1: 4.2 processes per core want to run: what was timed here is not to be trusted"
    assert warnings_of([GOOD, GOOD._replace(load=4.2)], None, []) == [said]
    assert warnings_of([GOOD._replace(load=0.4)], None, []) == []


def test_two_ranks_on_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in Cupy(gpus=2).modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    Device(0).use()
    healthy, rows = spawn(diagnose, 2)[0]
    found = dict(rows)
    assert re.fullmatch(r"rank 1: GPU 0 \(0000:01:00\.0\) of \S+", found["GPU"])  # threads of a process share its GPU
    assert "cupy 14.2.0" in found["versions"]
    assert found["host arrays"].startswith("local: ")
    assert found["GPU arrays"] == "staged through the host"
    assert ("warning", "ranks 0, 1 share a GPU: start one rank per GPU, or name them by device_map") in rows
    assert healthy


def test_sums_that_are_wrong_are_seen() -> None:
    def body(comm: Any) -> Any:
        reduce = comm.all_reduce

        def wrong(buf: Any, **options: Any) -> Any:
            handle = reduce(buf, **options)
            handle.wait()
            buf[-1] += comm.rank
            return handle

        comm.all_reduce = wrong
        return diagnose(comm)

    healthy, rows = spawn(body, 3)[0]
    assert not healthy
    assert all("the sum is WRONG on ranks 1, 2" in text for name, text in rows if name == "all-reduce")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([GOOD._replace(threads=2)] * 2, "n1: 4 threads of 2 ranks on 2 cores: set OMP_NUM_THREADS to 1, or start at "),
        ([GOOD._replace(free=1 << 20)] * 2, "n1: 1.00 MiB of shared memory are free: docker run --shm-size=8g, or "),
        ([GOOD._replace(driver=True)], "n1 has an NVIDIA driver, but CuPy sees no GPU: pip install 'fsdpx[cuda13]'"),
        (
            [GOOD, GOOD._replace(versions={**VERSIONS, "numpy": "2.0"})],
            "rank 1 on n1 has numpy 2.0, rank 0 has other versions: use one environment",
        ),
        ([GOOD._replace(writable=False)], "rank 0 on n1 cannot write /cache: set FSDPX_CACHE, else each job compiles "),
        (
            [GOOD._replace(versions={**VERSIONS, "numba": "not installed"})],
            "Numba is not installed: kernels are several times slower; pip install numba",
        ),
    ],
)  # fmt: skip
def test_warnings_have_remedies(ranks: list[RankFacts], words: str) -> None:
    (said,) = warnings_of(ranks, None, [])
    assert said.startswith(words)


def test_no_warning_without_a_reason() -> None:
    assert warnings_of([GOOD, GOOD], "MULTIPLE", []) == []
    (said,) = warnings_of([GOOD], "FUNNELED", [])
    assert said == "MPI's thread level is FUNNELED: transfers move between actions only (progress='loop')"


@pytest.mark.jobs
@pytest.mark.parametrize("messages", few([False, True], 1))
def test_under_mpiexec(tmp_path: Path, messages: bool) -> None:
    from trials import job

    done = job(tmp_path, "from fsdpx.__main__ import main\nimport sys\nsys.exit(main(['doctor', '--json']))", ranks=2,
               **({"FSDPX_NODE": "0"} if messages else {}))  # fmt: skip
    assert done.status == 0, done.err
    report = json.loads(done.out)
    found = dict(report["found"])
    assert report["healthy"]
    assert found["ranks"].startswith("2: ranks 0, 1 on ")
    assert re.search(r", thread level MULTIPLE; /\S+: ", found["MPI"])
    assert found["host arrays"].startswith("mpi: messages only" if messages else "node: shared memory, 2 ranks on one ")
    assert [text.endswith("the sum is right") for name, text in report["found"] if name == "all-reduce"] == [True] * 2
