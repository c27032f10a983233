"""Predictions for one H200 beside steps that were measured on it."""

import csv
from pathlib import Path
from statistics import median

from fsdpx import nn, plan


def test_steps_of_one_gpu():
    """Smaller models, whose dry runs are quick: what a step takes, in the median, and its memory."""
    lines = Path(__file__).with_name("h200-gpt.csv").read_text().splitlines()
    found = []
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        width, layers, heads, time, rows = (int(row[name]) for name in ("width", "layers", "heads", "time", "rows"))
        if width <= 768 and layers <= 12:
            model, tokens = nn.GPT(50304, width, layers, heads, time), ((rows, time), "int64")
            given = {"ranks": 1, "machine": "h200", "strategy": "ddp", "precision": row["precision"]}
            step = plan.predict(model, (tokens, tokens), **given)
            found.append((step.seconds / float(row["seconds"]), step.memory / int(row["bytes"])))
    print(*(f"{seconds:.2f} {memory:.2f}" for seconds, memory in found), sep="\n")
    assert len(found) == 17
    assert median(abs(seconds - 1) for seconds, _ in found) < 0.15
    assert all(0.95 < memory < 1.45 for _, memory in found)
