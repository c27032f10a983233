"""What all tests share."""

import gc
import os

import pytest
from hypothesis import settings
from ranks_of_mpi import Ranks

from fsdpx import environment

settings.register_profile("check", max_examples=10, derandomize=True, database=None, deadline=None)
settings.register_profile("suite", max_examples=60, derandomize=True, database=None, deadline=None)
settings.register_profile("thorough", max_examples=3000, database=None, deadline=None)
settings.load_profile("suite")

os.environ.setdefault("FSDPX_TUNE", "0")  # measurements belong to the tests that are about them
os.environ.pop("PYTHONUNBUFFERED", None)  # with it a print is several writes, and lines of the ranks of a job mix


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Under `mpirun -n 4` this is one of several ranks that run the same tests together."""
    found = environment.read()
    if found.launcher is not None and found.launcher.rank is not None and (found.expected_size or 1) > 1:
        config.pluginmanager.register(Ranks(found.launcher.rank), "ranks")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No rank of a job starts another job."""
    for item in items:
        if item.get_closest_marker("jobs"):
            item.add_marker(pytest.mark.mpi_skip)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Python need not search modules and thousands of tests for garbage again and again: a sixth of all time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(2000, 20, 20)
