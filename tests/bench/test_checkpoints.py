"""The benchmark of checkpoints: its jobs measure what they say, its tables have verdicts, failures have reasons."""

import re
from pathlib import Path

import pytest
from amount import in_full

import fsdpx


@in_full
def test_a_job_writes_and_reads_as_many_bytes_as_a_checkpoint_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from saving import bandwidth, stall
    from workloads import MODELS, Model

    monkeypatch.setitem(MODELS, "least", Model(8, 2, rows=4))

    found, other = fsdpx.spawn(bandwidth, 2, 0.001, 64, 1, tmp_path)
    assert found["bytes"] > 12 * 64 * 64 * round(0.001 * 2**30 / (12 * 64 * 64))
    assert found["bytes"] == other["bytes"]
    assert {len(found[name]) for name in ("plain", "save", "read", "load")} == {1}
    found, _ = fsdpx.spawn(stall, 2, "least", 1, 1, tmp_path)
    assert {len(found[name]) for name in ("with", "without", "call", "wait")} == {1}
    assert list(tmp_path.iterdir()) == []


def test_plain_files_are_as_large_as_asked(tmp_path: Path) -> None:
    from saving import write_plainly

    sizes = [7 << 20, 0, 5]
    write_plainly(tmp_path / "a", sizes, memoryview(bytes(4 << 20)))
    assert [(tmp_path / "a" / str(n)).stat().st_size for n in range(3)] == sizes


def test_rows_are_medians_with_verdicts_and_failures_have_reasons() -> None:
    from checkpoints import rows, tables

    moved = {"plain": [1.0, 2.0, 4.0], "save": [2.0, 2.0, 4.0], "read": [1.0] * 3, "load": [2.0] * 3, "bytes": 1 << 30}
    slow = moved | {"save": [2.0, 4.0, 8.0]}
    still = {"with": [4.5, 5.0], "without": [4.0, 4.0], "call": [0.1], "wait": [0.0], "window": 4, "bytes": 1 << 20}
    bad = [{"failed": "OSError: disk full"}]
    found = rows({"bandwidth": [[moved], [slow], bad], "stall": [[still], bad]}, "small")
    assert [r.get("saving") for r in found["bandwidth"]] == [1.0, 0.5, None]
    assert found["stall"][0]["share"] == 0.75 / 100
    wide, waits = (text for _, text in tables(found))
    assert re.search(r"^1 +1\.00 +537 +537 +1\.00 +yes +537 +1,074 +0\.50$", wide, re.M)
    assert re.search(r"^2 .* 0\.50 +no +537 ", wide, re.M)
    assert re.search(r"^4 +OSError: disk full$", wide, re.M)
    assert re.search(r"^1 +small +1 +1\.00 +0\.10 +0\.75 +0\.75 % +yes$", waits, re.M)
    assert re.search(r"^2 +small +OSError: disk full$", waits, re.M)
