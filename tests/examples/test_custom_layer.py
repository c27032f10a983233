"""The layer of one's own in the examples."""

import pytest

from fsdpx import spawn
from fsdpx.examples.custom_layer import LayerScale, main
from fsdpx.testing import LayerContract


class TestLayerScale(LayerContract):
    def make(self):
        return LayerScale(6)

    def inputs(self):
        return self.draw_normal(4, 3, 6)


def test_the_example_learns(capsys):
    losses = main(steps=60)
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert "step  10  loss" in capsys.readouterr().out


def test_the_example_does_the_same_on_three_ranks():
    alone = main(steps=5)
    for losses in spawn(lambda comm: main(steps=5), 3):
        assert losses == pytest.approx(alone, rel=1e-5)
