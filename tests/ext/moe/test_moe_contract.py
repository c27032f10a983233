"""The layers of experts keep the contract that `fsdpx.testing.LayerContract` tests."""

from layer_cases import contract_tests, rows

from fsdpx import nn
from fsdpx.nn.init import normal

CASES = {
    "MoE": (lambda: nn.MoE(4, 3, 5, 2, init=normal(0.7)), lambda: rows(3, 2, 4)),
    "ShardedMoE": (lambda: nn.sharding.ShardedMoE(4, 3, 5, 2, init=normal(0.7)), lambda: rows(3, 2, 4)),
}

globals().update(contract_tests(CASES, "fsdpx.ext.moe"))
