"""What does not go together with elastic ranks, and the page that shows the whole table."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpx import Machinery, Offload, nn, optim
from fsdpx.core.comm.local import single
from fsdpx.core.trainer.option_rules import ELASTIC, TABLE, Beside, Excluded, demand_together, table
from fsdpx.core.trainer.recipe import Distribution, Recipe, Training
from fsdpx.errors import ConfigError
from fsdpx.ext.asynchronous.exclusions import LOCAL, OWN
from fsdpx.ext.fields.grid import Grid

BESIDE = {
    "`backend`": (Machinery(backend="gloo"), Distribution()),
    "`offload`": (Machinery(), Distribution(offload=Offload("x"))),
    "`trace`": (Machinery(trace="x"), Distribution()),
    "`space`": (Machinery(), Distribution(space=Grid(single(), (4,)))),
    LOCAL: (Machinery(), Distribution("diloco")),
    OWN: (Machinery(), Distribution("async")),
}

PAGE = Path(__file__).parents[3] / "docs/sharp-bits.md"


def test_the_page_shows_the_table() -> None:
    shown = PAGE.read_text().partition("<!-- excluded -->\n")[2].partition("\n<!-- end -->")[0]
    assert shown == table()


def test_no_pair_stands_twice() -> None:
    pairs = [(row.choice, row.other) for row in TABLE]
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("row", [row for row in TABLE if row.choice == ELASTIC], ids=lambda row: row.other)
def test_an_error_says_why_and_what_to_do(row: Excluded) -> None:
    machinery, distribution = BESIDE[row.other]
    recipe = Recipe(Training(nn.Linear(2, 2), nn.MSE(), optim.AdamW()), distribution, machinery)
    with pytest.raises(ConfigError) as caught:
        demand_together(ELASTIC, Beside(recipe))
    assert str(caught.value).endswith(f": {row.why}; {row.remedy}")


def test_what_goes_together_is_taken() -> None:
    demand_together(ELASTIC, Beside(Recipe(Training(nn.Linear(2, 2), nn.MSE(), optim.AdamW()))))
