"""The memory of a process that a dry run expects is that of real ranks, within a tenth."""

import sys

import footprint
import pytest

pytestmark = [pytest.mark.jobs, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")]


@pytest.mark.parametrize(("model", "ranks"), [("many", 1), ("tiny", 3), ("mlp", 1)])
def test_a_process_takes_what_is_expected(model, ranks, monkeypatch):
    """What ranks share depends on their number, the rest on the model."""
    monkeypatch.setenv("FSDPX_TUNE", "0")
    # the second step finds the memory of the first; more change nothing
    found = footprint.compare(model, "fsdp", ranks, steps=2)
    assert "failed" not in found, found
    assert found["expected rss"] == pytest.approx(found["rss"], rel=0.1)
    assert found["expected pss"] == pytest.approx(found["pss"], rel=0.1)


def test_the_script_prints_its_table():
    rows = [{"model": "tiny", "strategy": "fsdp", "ranks": 2, "expected rss": 3 << 20, "expected pss": 2 << 20}]
    ((title, text),) = footprint.tables({"rows": [rows[0] | {"rss": 4 << 20, "pss": 2 << 20}, rows[0]]})
    assert title == "processes"
    assert text.splitlines()[1].split() == ["tiny", "fsdp", "2", "3", "4", "0.75", "2", "2", "1.00"]
    assert text.splitlines()[2].split() == ["tiny", "fsdp", "2", "3", "failed", "2", "failed"]
