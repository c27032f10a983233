"""The benchmark of state on disk: its ways train, its rates are those of the bytes, its page has its tables."""

from pathlib import Path


def test_rows_say_what_lies_where_and_tables_show_it(tmp_path: Path) -> None:
    from offload import WAYS, plain, tables, train

    rows = []
    for way in WAYS:
        found = train(way, layers=3, width=128, rows=4, steps=1, folder=tmp_path)
        found["plain"] = plain(tmp_path, found["moved"] // 2) if found["moved"] else 0.0
        rows.append({"way": way, **found})
    state = 3 * 128 * 128 * 4
    assert [row["disk"] for row in rows] == [0, 2 * state, 3 * state, 3 * state, 4 * state]
    assert [row["moved"] for row in rows] == [0, 4 * state, 6 * state, 6 * state, 6 * state]
    (_, memory), (_, rates) = tables({"rows": rows})
    assert len(memory.splitlines()) == 1 + len(WAYS)
    assert len(rates.splitlines()) == len(WAYS)


def test_its_tables_are_on_the_page() -> None:
    from page import PAGES, render

    text = next(page for page in PAGES if page.stem == "offload").read_text()
    assert text.count("<!-- offload: ") == 3
    assert render(text, Path("nowhere")).count("not measured yet: python bench/offload.py") == 3
