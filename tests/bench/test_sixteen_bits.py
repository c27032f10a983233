"""Training in 16 bits: tables of what was measured."""


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


def test_rates_in_16_bits_are_compared_with_those_of_float32() -> None:
    import halves
    from goals import AGAINST
    from side_by_side import DUELS

    rows = [
        {"model": "mlp", "job": "fsdpx ddp 1x1", "rate": 100.0},
        {"model": "mlp", "job": "fsdpx-bf16 ddp 1x1", "rate": 210.0},
        {"model": "tiny", "job": "fsdpx-bf16 ddp 1x1", "rate": 1.0},
    ]
    text = halves.beside_float32({"rows": rows})
    assert [line.split() for line in text.splitlines()] == [
        ["model", "float32", "bf16", "ratio"],
        ["mlp", "100.0", "210.0", "2.10"],
    ]
    ours = {job.name for job in halves.JOBS if job.library.startswith("fsdpx-")}
    assert ours <= set(DUELS)
    assert {AGAINST[name] for name in ours} <= {job.name for job in halves.JOBS}
