"""Libraries of files of fields: a test that takes one is skipped where it is not installed."""

import pytest


@pytest.fixture
def h5py():
    return pytest.importorskip("h5py")


@pytest.fixture
def zarr():
    return pytest.importorskip("zarr")
