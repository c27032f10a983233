"""The memory of a process that a dry run expects is that of real ranks, within a tenth."""

import os
import sys

import pytest

pytestmark = [pytest.mark.jobs, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")]


@pytest.mark.parametrize(("model", "ranks"), [("many", 1), ("tiny", 3), ("mlp", 1)])
def test_a_process_takes_what_is_expected(model: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks share depends on their number, the rest on the model."""
    from footprint import compare

    monkeypatch.setitem(os.environ, "FSDPX_TUNE", "0")
    found = compare(model, "fsdp", ranks, steps=2)  # the second finds the memory of the first; more change nothing
    assert "failed" not in found, found
    assert found["expected rss"] == pytest.approx(found["rss"], rel=0.1)
    assert found["expected pss"] == pytest.approx(found["pss"], rel=0.1)


def test_the_script_prints_its_table(tmp_path) -> None:
    import footprint

    rows = [{"model": "tiny", "strategy": "fsdp", "ranks": 2, "expected rss": 3 << 20, "expected pss": 2 << 20}]
    ((title, text),) = footprint.tables({"rows": [rows[0] | {"rss": 4 << 20, "pss": 2 << 20}, rows[0]]})
    assert title == "processes"
    assert text.splitlines()[1].split() == ["tiny", "fsdp", "2", "3", "4", "0.75", "2", "2", "1.00"]
    assert text.splitlines()[2].split() == ["tiny", "fsdp", "2", "3", "failed", "2", "failed"]
