"""The layers of experts keep the contract that `fsdpx.testing.LayerContract` tests."""

import pytest
from layer_cases import check_kernels, check_text, contracts_of, layers_of, rows

from fsdpx import nn
from fsdpx.nn.init import normal

CASES = {
    "MoE": (lambda: nn.MoE(4, 3, 5, 2, init=normal(0.7)), lambda: rows(3, 2, 4)),
    "CutMoE": (lambda: nn.CutMoE(4, 3, 5, 2, init=normal(0.7)), lambda: rows(3, 2, 4)),
}

globals().update(contracts_of(CASES))


@pytest.mark.parametrize("name", CASES)
def test_no_kernel_is_compiled_in_a_step(name):
    check_kernels(CASES, name)


@pytest.mark.parametrize("name", CASES)
def test_the_text_of_a_layer_shows_every_argument(name):
    check_text(CASES, name)


def test_every_layer_of_the_package_is_tested_here():
    assert layers_of("fsdpx.ext.moe") <= {type(make()) for make, *_ in CASES.values()}
