"""Samples in columns of Parquet and Arrow files: in any order, by many ranks, again from the middle."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpx
from fsdpx import data
from fsdpx.errors import ConfigError, DataError

try:
    import pyarrow
    import pyarrow.parquet
except ImportError:
    pyarrow = None

needed = pytest.mark.skipif(pyarrow is None, reason="pyarrow is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """20 samples: 12 in three groups of a Parquet file, 8 in an Arrow stream as the datasets library writes it."""
    table = pyarrow.table({"n": list(range(20)), "tokens": [[n, 2 * n] for n in range(20)], "other": ["x"] * 20})
    pyarrow.parquet.write_table(table.slice(0, 12), tmp_path / "a.parquet", row_group_size=5)
    with pyarrow.OSFile(str(tmp_path / "b.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table.slice(12), max_chunksize=3)
    return tmp_path


@needed
def test_samples_by_number(folder: Path) -> None:
    found = data.ParquetDataset(folder, ["tokens", "n"])
    assert len(found) == 20
    assert repr(found) == "ParquetDataset(2 files, 20 samples of tokens, n)"
    for i in (19, 0, 4, 5, 11, 12, -3):
        tokens, n = found[i]
        assert (tokens.tolist(), n) == ([i % 20, 2 * (i % 20)], i % 20)
    with pytest.raises(IndexError, match="sample 20 of 20"):
        found[20]


@needed
def test_each_sample_once_on_any_ranks_and_again_from_the_middle(folder: Path) -> None:
    def numbers(loader: Any) -> list[list[int]]:
        return [n.tolist() for _, n in loader]

    def run(comm: Any) -> Any:
        loader = data.DataLoader(data.ParquetDataset(folder, ["tokens", "n"]), 6, comm=comm, shuffle=True, seed=1)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        rest = [n.tolist() for _, n in batches]
        again = data.DataLoader(data.ParquetDataset(folder, ["tokens", "n"]), 6, comm=comm, shuffle=True, seed=1)
        again.load_state_dict(state)
        assert numbers(again) == rest
        loader.set_epoch(0)
        return numbers(loader)

    found = [np.concatenate(parts).tolist() for parts in zip(*fsdpx.spawn(run, 3), strict=True)]
    assert sorted(n for batch in found for n in batch) == list(range(20))
    assert found == [np.concatenate(parts).tolist() for parts in zip(*fsdpx.spawn(run, 1), strict=True)]


@needed
def test_what_is_not_there_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.parquet: there is no column text; it has n, tokens, other"):
        data.ParquetDataset(folder, ["text"])
    with pytest.raises(DataError, match=r"/none does not exist"):
        data.ParquetDataset(folder / "none", ["n"])
    with pytest.raises(ConfigError, match=r"columns='n'\): name the columns of a sample, such as \['tokens'\]"):
        data.ParquetDataset(folder, "n")
    (folder / "a.parquet").write_bytes(b"no such file")
    with pytest.raises(DataError, match=r"ParquetDataset: .*a\.parquet: "):
        data.ParquetDataset(folder, ["n"])


def test_without_pyarrow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs the pyarrow library: pip install 'fsdpx\[parquet\]'"):
        data.ParquetDataset(tmp_path, ["n"])
