"""The layers with adapters keep the contract that `fsdpx.testing.LayerContract` tests."""

import pytest
from layer_cases import check_kernels, check_text, contracts_of, layers_of, rows

from fsdpx import nn

CASES = {
    "LoRALinear": (lambda: nn.LoRALinear(nn.Linear(5, 3), 2, 4.0, 0.3), lambda: rows(4, 2, 5)),
    "LoRAOfMLP": (lambda: nn.lora(nn.MLP(4, dropout=0.2), 2, 4.0, 0.3, targets="*"), lambda: rows(3, 2, 4)),
}

globals().update(contracts_of(CASES))


@pytest.mark.parametrize("name", CASES)
def test_no_kernel_is_compiled_in_a_step(name):
    check_kernels(CASES, name)


@pytest.mark.parametrize("name", CASES)
def test_the_text_of_a_layer_shows_every_argument(name):
    check_text(CASES, name)


def test_every_layer_of_the_package_is_tested_here():
    assert layers_of("fsdpx.ext.lora") <= {type(make()) for make, *_ in CASES.values()}
