"""The layers with adapters keep the contract that `fsdpx.testing.LayerContract` tests."""

from layer_cases import contract_tests, rows

from fsdpx import nn

CASES = {
    "LoRALinear": (lambda: nn.LoRALinear(nn.Linear(5, 3), 2, 4.0, 0.3), lambda: rows(4, 2, 5)),
    "LoRAOfMLP": (lambda: nn.add_lora(nn.MLP(4, dropout=0.2), 2, 4.0, 0.3, targets="*"), lambda: rows(3, 2, 4)),
}

globals().update(contract_tests(CASES, "fsdpx.ext.lora"))
