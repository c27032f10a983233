"""Codecs that round are refused beside chunks."""

from __future__ import annotations

import re
from typing import Any

import pytest
from models import make

import fsdpx
from fsdpx import spawn
from fsdpx.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"compression": "int8"}, "Int8"),
        ({"compression": fsdpx.PowerSGD(2)}, "PowerSGD"),
        ({"compression": {"*.bias": "plain", "*": "topk"}}, "TopK"),
        ({"compression": fsdpx.HierarchicalCompression("int8"), "strategy": "ddp"}, "Int8"),
        ({"precision": fsdpx.Precision(reduce="bf16")}, "Cast16"),
    ],
)
def test_codecs_are_refused(options: dict[str, Any], name: str) -> None:
    said = f"reproducible_chunks=4: codec {name} rounds gradients before they are sent, so results depend on"
    with pytest.raises(ConfigError, match=re.escape(said)):
        spawn(lambda comm: make(comm, "mlp", reproducible_chunks=4, **{"precision": "float32", **options}), 2)
