"""The table of a model of 7 billion parameters is what dry runs say today, and stands on its page."""

import re

import pytest
from amount import in_full


@in_full
def test_the_rows_of_4_ranks_are_those_of_the_page() -> None:
    from page import DOCS
    from seven import STRATEGIES, rows, tables

    shown = dict(tables({"rows": rows(4)}))["4 ranks"]
    assert f"```text\n{shown}\n```" in (DOCS / "memory-and-traffic.md").read_text()
    full, sharded, hybrid, data = (line.split()[-6:] for line in shown.splitlines()[1:])
    assert len(STRATEGIES) == len([full, sharded, hybrid, data])
    assert 4 * float(full[0]) == pytest.approx(float(data[0]), rel=1e-3)


def test_the_page_of_benchmarks_has_no_table_that_make_bench_does_not_write() -> None:
    from page import MARK, PAGE, PAGES

    (target,) = re.findall(r"^bench:.*\n((?:\t.*\n)+)", (PAGE.parents[1] / "Makefile").read_text(), re.M)
    for page in (PAGE, next(page for page in PAGES if page.stem == "memory-and-traffic")):
        names = {found[2] for found in MARK.finditer(page.read_text())}
        assert names
        assert [name for name in sorted(names) if f" bench/{name}.py" not in target] == []
