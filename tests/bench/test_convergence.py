"""Where training in 16 bits ends: the table of what was measured."""


def test_losses_are_compared_with_those_of_float32_seed_by_seed() -> None:
    import convergence

    rows = [
        {"format": "float32", "seed": 0, "validation": 2.0},
        {"format": "float32", "seed": 1, "validation": 3.0},
        {"format": "bf16", "seed": 0, "validation": 2.02},
        {"format": "bf16", "seed": 1, "validation": 2.97},
        {"format": "bf16 alone, kahan", "seed": 0, "failed": "killed"},
    ]
    ((title, text),) = convergence.tables({"rows": rows, "steps": 300})
    assert title == "validation loss"
    head, _, half = text.splitlines()
    assert head.split() == ["format", "seed", "0", "seed", "1", "to", "float32,", "0", "to", "float32,", "1", "mean"]
    assert half.split() == ["bf16", "2.0200", "2.9700", "+1.00", "%", "-1.00", "%", "-0.20", "%"]
