"""The rows of a log that `fit` wrote."""

import csv
import json
from pathlib import Path
from typing import Any


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, which those of metrics.csv must equal."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with (folder / "metrics.csv").open(newline="") as file:
        table = [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]
    assert table == lines
    return lines
