"""`mpirun -n 3 pytest`: the tests of the world run together, rank 0 reports, and a failure of one is one of all."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import start
from ranks_of_mpi import in_turn
from trials import ROOT, none_left

from fsdpx.testing.communicator import ALL_DTYPES, CommunicatorContract

TESTS = """
import os, sys
import pytest
from mpi4py import MPI

@pytest.mark.world
def test_all_of_them(tmp_path):
    paths = MPI.COMM_WORLD.allgather(str(tmp_path))
    assert len(set(paths)) == MPI.COMM_WORLD.size

@pytest.mark.world
def test_one_of_them():
    assert not (os.environ.get("FAILS") and MPI.COMM_WORLD.rank == 1), "rank 1 has failed"

@pytest.mark.jobs
def test_a_job():
    raise AssertionError("not here")

def test_without_mpi():
    raise AssertionError("not here")
"""


def pytest_in(folder, *options, ranks=1, **variables):
    """With our conftest.py."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    quick = "[pytest]\naddopts = -p no:zarr -p no:anyio -p no:hypothesispytest\n"
    (folder / "pytest.ini").write_text(f"{quick}markers =\n    world: all ranks\n    jobs: starts some\n")
    (folder / "tmp").mkdir(exist_ok=True)
    variables |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TMPDIR": str(folder / "tmp")}
    return start(ranks, "-m", "pytest", *options, folder=folder, **variables)


def run(folder, *options, ranks=2, **variables):
    (folder / "test_some.py").write_text(TESTS)
    done = pytest_in(folder, *options, ranks=ranks, **variables)
    assert none_left(folder)
    assert list((folder / "tmp").glob("rank-*")) == []
    return done


def test_each_dtype_is_tried_on_each_number_of_ranks_and_by_each_transport() -> None:
    classes = [type(f"Test{n}", (CommunicatorContract,), {}) for n in range(4)]
    cases = [SimpleNamespace(cls=cls, callspec=SimpleNamespace(params={"dtype": dtype}))
             for cls in classes for dtype in ALL_DTYPES]  # fmt: skip
    others = [SimpleNamespace(cls=classes[0]), SimpleNamespace()]
    kept = {size: in_turn(cases + others, size) for size in (2, 3, 4, 5)}
    for size, found in kept.items():
        assert found[-2:] == others
        assert {case.callspec.params["dtype"] for case in found[:-2]} == set(ALL_DTYPES), size
        assert len(found) < len(cases) / 2
    for case in cases:
        assert any(case in found for found in kept.values())


def test_above_communicators_there_is_one_transport_and_with_two_ranks_more_the_other() -> None:
    def case(name, world):
        return SimpleNamespace(nodeid=name, callspec=SimpleNamespace(params={"world": world, "strategy": "fsdp"}))

    cases = [case(name, world) for world in ("node", "mpi") for name in ("tests/a.py::one[x]", "tests/a.py::two[x]")]
    below = [case("tests/core/comm/a.py::one[x]", world) for world in ("node", "mpi")]
    for size in (2, 3, 4):
        kept, then = in_turn(cases + below, size), in_turn(cases + below, size + 2)
        assert [one for one in kept if one in then] == below
        assert sorted(one.nodeid for one in kept[:-2]) == ["tests/a.py::one[x]", "tests/a.py::two[x]"]
        assert len({one.callspec.params["world"] for one in kept[:-2]}) == 2
    many = [case(f"tests/a.py::test_{n}[x]", world) for world in ("node", "mpi") for n in range(4)]
    one, five = ({one.nodeid for one in in_turn(many, size)} for size in (1, 5))
    assert (len(one), len(five), len(one | five)) == (2, 2, 4)
    few = [case("tests/ext/moe/a.py::one[x]", world) for world in ("node", "mpi")]
    assert [len(in_turn(few, size)) for size in (1, 2, 3, 4, 5)] == [0, 1, 1, 0, 0]
    assert in_turn(few, 2) != in_turn(few, 3)


@pytest.mark.jobs
def test_what_was_skipped_for_want_of_a_library_runs_alone_when_that_is_there(tmp_path: Path) -> None:
    needs, one = "import pytest; pytest.importorskip('lacking')\n", "def test_it(): pass\n"
    (tmp_path / "test_all.py").write_text(needs + one)
    (tmp_path / "test_one.py").write_text(f"{one}def test_with():\n    {needs}")
    assert "1 passed, 2 skipped" in pytest_in(tmp_path).stdout
    (tmp_path / "lacking.py").touch()
    assert "2 passed, 1 deselected" not in pytest_in(tmp_path, "--wanting", "another").stdout
    for name in ([], [Path(sys.prefix).name]):  # what it runs is still what the first run lacked
        assert "2 passed, 1 deselected" in pytest_in(tmp_path, "--wanting", *name).stdout


@pytest.mark.jobs
def test_ranks_run_what_is_theirs(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "world", "--with-mpi")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 passed") == 1
    assert "skipped" not in done.stdout
    assert "not here" not in done.stdout


@pytest.mark.jobs
def test_a_failure_of_one_rank_is_one_of_all(tmp_path: Path) -> None:
    """Without options, too, no rank starts a job, or runs what is for one process."""
    done = run(tmp_path, ranks=3, FAILS="1")
    assert done.returncode != 0
    assert "2 passed, 1 skipped" in done.stdout  # of rank 0
    assert "not here" not in done.stdout
    assert "[rank 1]" in done.stdout
    assert "rank 1 has failed" in done.stdout
    assert "[rank 2]" not in done.stdout
