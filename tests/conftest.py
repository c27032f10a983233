"""What all tests share."""

import functools
import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bits import explained
from contracts import is_contract, merge_checks
from hypothesis import settings
from present import ABSENT, absent, extension_of
from ranks import OVER_GLOO
from ranks_of_mpi import TRANSPORTS, Ranks

from fsdpx.core.array import blas, parallel
from fsdpx.core.base import environment
from fsdpx.core.comm import Communicator
from fsdpx.core.comm.init import open_world as open_world

settings.register_profile("check", max_examples=10, derandomize=True, database=None, deadline=None)
settings.register_profile("suite", max_examples=40, derandomize=True, database=None, deadline=None)
settings.register_profile("thorough", max_examples=3000, database=None, deadline=None)
settings.load_profile("suite")

os.environ.setdefault("FSDPX_TUNE", "0")  # measurements belong to the tests that are about them
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process of a job would compile all modules again
os.environ.pop("PYTHONUNBUFFERED", None)  # with it a print is several writes, and lines of the ranks of a job mix


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Under `mpirun -n 4` this is one of several ranks that run the same tests together."""
    found = environment.read_environment()
    size = found.expected_size or 1
    several = size > 1 or config.option.markexpr == "world"  # a rank alone has one transport under two names
    if found.launcher is not None and found.launcher.rank is not None and several:
        config.pluginmanager.register(Ranks(found.launcher.rank, size, found.launcher.mpi), "ranks")
    else:  # ranks of jobs that tests start: those that wait leave the cores to those that work
        os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")


WANTING = "fsdpx/wanting/{}"
"""In pytest's cache: the tests, and files of them, that the last run skipped for want of a library, by the name of the
virtual environment."""

LONG_TESTS = Path(__file__).with_name("long_tests.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--wanting", nargs="?", const=Path(sys.prefix).name, metavar="ENVIRONMENT",
        help="only what the last run skipped for want of a library, in this virtual environment or another one",
    )  # fmt: skip
    parser.addoption("--blas", help="the library of matrix products in the processes of pytest")
    parser.addoption("--threads", type=int, default=1, help="on how many threads kernels run when a test begins")


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    if name := config.getoption("blas", None):
        blas.select_library(name)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A trainer sets the threads of its process, and some tests the library of products: none begins with those of the
    test before it."""
    threads = item.config.getoption("threads")
    parallel.set_threads(threads)
    blas.set_product_threads(threads)
    if blas.libraries.requested_library != (name := item.config.getoption("blas")):
        blas.select_library(name)


@functools.cache
def wanting(config: pytest.Config) -> set[str]:
    lacking = config.getoption("wanting", None)
    return set(config.cache.get(WANTING.format(lacking), [])) if lacking else set()


@pytest.hookimpl
def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m world` and `--wanting` are some files: importing all of them takes every process some seconds."""
    if collection_path.suffix != ".py":
        return None
    if config.getoption("wanting", None):
        files = {config.rootpath / name.partition("::")[0] for name in wanting(config)}
        return None if collection_path in files else True
    if config.option.markexpr != "world":
        return None
    return None if "mark.world" in collection_path.read_text(encoding="utf-8") else True


class Absent(pytest.Module):
    """Tests of an extension whose folder was deleted: none of them is looked for."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        pytest.skip(ABSENT.format(absent()[str(extension_of(self.path))]), allow_module_level=True)


@pytest.hookimpl
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return Absent.from_parent(parent, path=module_path) if extension_of(module_path) in absent() else None


@pytest.hookimpl
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> pytest.Class | None:
    """A class that inherits a contract is few tests instead of one for each of its checks."""
    if not (name.startswith("Test") and is_contract(obj)):
        return None
    found: pytest.Class = pytest.Class.from_parent(collector, name=name)
    found.obj = merge_checks(found.obj)  # pytest takes the marks of the class when it is asked for
    return found


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is made while tests are looked for stays: none of it is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """No rank of a job starts another job. `make check` leaves out long tests, and what `some_of_each` does."""
    for item in items:
        if item.get_closest_marker("jobs"):
            item.add_marker(pytest.mark.mpi_skip)
    if wanted := wanting(config):
        mine = [item for item in items if not wanted.isdisjoint({item.nodeid, item.nodeid.partition("::")[0]})]
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = mine
    yield
    if settings.get_current_profile_name() == "check":
        long = set(LONG_TESTS.read_text(encoding="utf-8").splitlines())
        left_out = [item for item in items if name_of(item) in long]
        items[:] = [item for item in items if name_of(item) not in long]
        config.hook.pytest_deselected(items=left_out + some_of_each(items))


def name_of(item: pytest.Item) -> str:
    """The test of which this item is a case."""
    return item.nodeid.partition("[")[0]


def some_of_each(items: list[pytest.Item]) -> list[pytest.Item]:
    """Keep the first and the last case of each test among those that are the first with some value of some parameter;
    returns the others."""
    seen: set[tuple[str, str, str]] = set()
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = name_of(item)
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        values = {(name, parameter, repr(value)) for parameter, value in parameters.items()}
        if not values or values - seen:
            cases.setdefault(name, []).append(item)
        seen |= values
    kept = {item for found in cases.values() for item in (found[0], found[-1])}
    others = [item for item in items if item not in kept]
    items[:] = [item for item in items if item in kept]
    return others


@pytest.fixture(scope="module", params=["gloo"] if OVER_GLOO else TRANSPORTS)
def world(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    """All ranks of this job, with the host's shared memory, and of MPI over messages alone."""
    comm = open_world(request.param)
    yield comm
    comm.close()


@pytest.hookimpl
def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Where parameters of two trainers are not equal: the tensor and the element."""
    found = list(explained(left, right)) if op == "==" else []
    return [f"{left!r} == {right!r}", *found] if found else None


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was skipped for want of a library is kept for `--wanting`. Layers and losses are compared with PyTorch's:
    where it is not installed, the last lines say so."""
    lacking = re.compile("could not import|needs PyTorch")
    skipped = [one for one in terminalreporter.getreports("skipped") if lacking.search(str(one.longrepr))]
    if hasattr(config, "cache") and not config.getoption("wanting", None):
        config.cache.set(WANTING.format(Path(sys.prefix).name), sorted({one.nodeid for one in skipped}))
    if without := [one for one in skipped if re.search("'torch'|PyTorch", str(one.longrepr))]:
        terminalreporter.write_line(
            f"PyTorch is not installed: {len(without)} tests or files of tests that compare with it were skipped; "
            "pip install torch, and they run",
            yellow=True,
        )


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Python need not search modules and thousands of tests for garbage again and again: a sixth of all time. Where
    every core has a test of its own, threads of PyTorch wait long for each other."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 200)
