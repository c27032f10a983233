"""What does not go together with elastic ranks, and the page that lists all pairs."""

from pathlib import Path

import pytest

from fsdpx import OffloadConfig, RuntimeOptions, nn, optim
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.core.trainer.option_rules import (
    EXCLUSIONS,
    ChoiceContext,
    format_exclusion_lists,
    require_compatible_options,
)
from fsdpx.core.trainer.recipe import DistributionChoices, Recipe, TrainingChoices
from fsdpx.errors import ConfigError
from fsdpx.ext.elastic.exclusions import ELASTIC
from fsdpx.ext.fields.grid import Grid

OTHER_TRAINING = "local or asynchronous training"
BESIDE = [
    ("`backend`", RuntimeOptions(backend="gloo"), DistributionChoices()),
    ("`offload`", RuntimeOptions(), DistributionChoices(offload=OffloadConfig("x"))),
    ("`trace`", RuntimeOptions(trace="x"), DistributionChoices()),
    ("`replay`", RuntimeOptions(replay=True), DistributionChoices()),
    ("`domain`", RuntimeOptions(), DistributionChoices(domain=Grid(make_single_rank_communicator(), (4,)))),
    (OTHER_TRAINING, RuntimeOptions(), DistributionChoices("diloco")),
    (OTHER_TRAINING, RuntimeOptions(), DistributionChoices("async")),
]

PAGE = Path(__file__).parents[3] / "docs/reference/choices.md"


def test_the_page_shows_the_lists():
    shown = PAGE.read_text().partition("<!-- excluded -->\n")[2].partition("\n<!-- end -->")[0]
    assert shown == format_exclusion_lists()


def test_no_pair_stands_twice():
    pairs = [(row.choice, row.other) for row in EXCLUSIONS]
    assert len(pairs) == len(set(pairs))


def test_an_error_says_why_and_what_to_do():
    rows = {row.other: row for row in EXCLUSIONS if row.choice == ELASTIC}
    assert rows.keys() == {other for other, *_ in BESIDE}
    for other, machinery, distribution in BESIDE:
        recipe = Recipe(TrainingChoices(nn.Linear(2, 2), nn.MSELoss(), optim.AdamW()), distribution, machinery)
        with pytest.raises(ConfigError) as caught:
            require_compatible_options(ELASTIC, ChoiceContext(recipe))
        assert str(caught.value).endswith(f": {rows[other].why}; {rows[other].remedy}")
