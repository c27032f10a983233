"""Context parallelism: a sequence cut from end to end gives what one process gives, and never exists whole."""

import numpy as np
import pytest

from fsdpx import nn
from fsdpx.comm import Axes, Mesh, connect
from fsdpx.comm.opening import world as open_world
from fsdpx.errors import ShapeError

from .ranks import check, compare, environment, full, local, on_axis, once

rng = np.random.default_rng(0)
BOTH = pytest.mark.parametrize("sequence", ["ulysses", "ring"])


@BOTH
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_gpt(width, dropout, split, sequence):
    x, target = rng.integers(0, 11, (2, 2, 12))
    target[0, :5] = -100  # one rank may have nothing that counts
    loss = nn.CrossEntropy(label_smoothing=0.1)
    model = nn.GPT(11, 20, 2, 5, 16, dropout=dropout)
    planned, runs = compare(model, loss, x, target, width, split, sequence=sequence)
    if width > 1:
        assert planned.output_dim == 1
        assert planned.loss.partial
        assert planned.partial == set(model.specs())
        assert runs[0].y.shape == (2, 12 // width, 11)


@pytest.mark.parametrize("time", [1, 2, 5, 11])
@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("sequence", ["parallel", "ulysses", "ring"])
def test_sequences_that_do_not_divide(sequence, width, time):
    """A rank of a sequence that is shorter than the axis has no positions at all."""
    x, target = rng.integers(0, 11, (2, 2, time))
    loss, recompute = nn.CrossEntropy(label_smoothing=0.1), frozenset(["attention"])
    for dropout, split, options in ((0.0, False, {}), (0.3, True, {}), (0.3, False, {"recompute": recompute})):
        model = nn.GPT(11, 20, 2, 5, 11, dropout=dropout)
        _, runs = compare(model, loss, x, target, width, split, options, sequence=sequence)
    if sequence != "parallel":
        assert [run.y.shape[1] for run in runs] == np.diff([time * r // width for r in range(width + 1)]).tolist()
    x, target = rng.standard_normal((2, 2, time, 12))
    for dropout in (0.0, 0.3):
        block = nn.TransformerBlock(12, 3, causal=False, dropout=dropout)
        compare(block, nn.MSE(), x, target, width, sequence=sequence)


class Drop(nn.Layer):
    """As a user writes it: dropout by the global place of an element, wherever it stands."""

    acts_on = "position"

    def forward(self, env, p, x):
        keep = env.random.subarray(x.shape, {1: env.place(x.shape[1])}).fractions(env.xp) >= 0.5
        return x * keep, (keep,)

    def backward_input(self, env, p, saved, dy):
        return dy * saved[0], ()


@pytest.mark.parametrize("time", [1, 5, 6])
@pytest.mark.parametrize("sequence", [None, "parallel", "ring"])
def test_a_layer_of_ones_own_finds_its_place(sequence, time):
    x, target = rng.standard_normal((2, 3, time, 8))
    compare(nn.Chain(nn.TransformerBlock(8, 4), Drop()), nn.MSE(), x, target, 3, sequence=sequence)


@BOTH
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_blocks(causal, dropout, sequence):
    """More than one tile of the compiled kernel per rank, and the gradient of an input that is given whole."""
    for time in (210, 194):  # 194: parts of 64, 65 and 65, which end before, and just behind, a tile's end
        x, target = rng.standard_normal((1, time, 8)), rng.standard_normal((1, time, 8))
        compare(nn.TransformerBlock(8, 4, causal=causal, dropout=dropout), nn.MSE(), x, target, 3, sequence=sequence)


@BOTH
def test_attention_by_itself_and_no_samples(sequence):
    x, target = rng.standard_normal((2, 8, 12)), rng.standard_normal((2, 8, 12))
    for layer in (nn.MultiHeadAttention(12, 3, causal=False), nn.MultiHeadAttention(12, 3, dropout=0.5, bias=False)):
        compare(layer, nn.BCEWithLogits(), x, target, 2, sequence=sequence)
        compare(layer, nn.MSE(), x[:0], target[:0], 2, sequence=sequence)
    compare(nn.MultiHeadAttention(12, 3, dropout=0.5), nn.MSE(), x, target, 2, sequence=sequence,
            options={"training": False})  # fmt: skip


@BOTH
def test_recomputed_attention_gives_the_same_bits(sequence):
    x, target = rng.standard_normal((2, 8, 12)), rng.standard_normal((2, 8, 12))
    model = nn.TransformerBlock(12, 3, dropout=0.3)
    kept, recomputed = (
        compare(model, nn.MSE(), x, target, 2, sequence=sequence, options={"recompute": frozenset(names)})[1]
        for names in ((), ("attention",))
    )
    for one, other in zip(kept, recomputed, strict=True):
        assert one.dx.tobytes() == other.dx.tobytes()
        assert all(one.g[name].tobytes() == other.g[name].tobytes() for name in one.g)
        moved = other.backward.of("tensor").bytes - one.backward.of("tensor").bytes
        assert moved == one.forward.of("tensor").bytes > 0, "the forward of attention goes over the axis once more"


@pytest.mark.parametrize("width", [2, 3, 4])
def test_bytes_of_ulysses(width):
    """Jacobs et al. 2023: four all-to-alls of b s h / N elements, here q, k and v in one message."""
    b, s, h = 2, 12, 24
    x, target = rng.standard_normal((b, s, h)), rng.standard_normal((b, s, h))
    _, runs = compare(nn.MultiHeadAttention(h, 12), nn.MSE(), x, target, width, sequence="ulysses")
    for run in runs:
        for counted in (run.forward, run.backward):
            count = counted.of("tensor", "all_to_all")
            assert (count.calls, count.bytes // 8) == (2, 4 * (b * s * h // width) * (width - 1) // width)
        assert {verb for _, verb, _, _ in run.forward} == {"all_to_all"}


@pytest.mark.parametrize("width", [2, 3, 4])
def test_bytes_of_a_ring(width):
    """Liu et al. 2023: keys and values go to N - 1 others, and in backward their gradients N times, to their rank."""
    b, s, h = 2, 12, 24
    x, target = rng.standard_normal((b, s, h)), rng.standard_normal((b, s, h))
    _, runs = compare(nn.MultiHeadAttention(h, 12), nn.MSE(), x, target, width, sequence="ring")
    part = b * s * h // width
    for run in runs:
        sent = run.forward.of("tensor", "send")
        assert (sent.calls, sent.bytes // 8) == (width - 1, 2 * (width - 1) * part)
        assert {verb for _, verb, _, _ in run.forward} == {"send", "recv"}
        sent = run.backward.of("tensor", "send")
        assert (sent.calls, sent.bytes // 8) == (2 * width - 1, 2 * (2 * width - 1) * part)


@pytest.mark.parametrize("time", [1, 5])
def test_bytes_of_a_ring_of_uneven_parts(time):
    """Every block makes the same journey, whatever its size: the ranks together send what even ones would."""
    b, h, width = 2, 12, 3
    x, target = rng.standard_normal((b, time, h)), rng.standard_normal((b, time, h))
    _, runs = compare(nn.MultiHeadAttention(h, 3), nn.MSE(), x, target, width, sequence="ring")
    for counters, journeys in (("forward", width - 1), ("backward", 2 * width - 1)):
        sent = [getattr(run, counters).of("tensor", "send") for run in runs]
        assert [count.calls for count in sent] == [journeys] * width
        assert sum(count.bytes // 8 for count in sent) == journeys * 2 * b * time * h


def held(saved) -> set[int]:
    """Bytes of the arrays that are kept."""
    if isinstance(saved, tuple):
        return {n for part in saved for n in held(part)}
    return {saved.nbytes} if isinstance(saved, np.ndarray) else set()


@BOTH
def test_no_rank_keeps_more_than_its_part(sequence):
    """Without dropout nothing that is kept is larger than queries, keys and values of 1/N of the time."""
    b, s, h, width = 1, 64, 8, 4
    model = nn.MultiHeadAttention(h, 4)
    planned = nn.parallelise(nn.Chain(model), nn.MSE(), width, sequence=sequence)
    x = rng.standard_normal((b, s, h))

    def body(axes: Axes):
        _, saved = planned.model.forward(environment(axes), local(planned.model, full(planned.model), 0, 1), x)
        return max(held(saved))

    assert max(on_axis(width, body)) == 3 * b * s * h * 8 // width


def test_a_ring_of_sixteen_bits_adds_in_float32():
    import ml_dtypes

    bf16, model = ml_dtypes.bfloat16, nn.MultiHeadAttention(8, 2, dropout=0.2)
    x, target = rng.standard_normal((2, 12, 8)), rng.standard_normal((2, 12, 8))
    p = full(model)
    want = once(model, nn.MSE(), p, x, target, environment())
    planned = nn.parallelise(model, nn.MSE(), 3, sequence="ring")

    def body(axes: Axes):
        narrow = {name: a.astype(bf16) for name, a in p.items()}
        return once(planned.model, planned.loss, narrow, x.astype(bf16), target, environment(axes))

    runs = on_axis(3, body)
    assert runs[0].y.dtype == runs[0].dx.dtype == bf16
    np.testing.assert_allclose(np.concatenate([r.y for r in runs], 1).astype(float), want.y, atol=0.03)


def test_sequences_that_do_not_fit():
    model = nn.GPT(11, 8, 1, 2, 8)  # and nobody says how long they are
    planned = nn.parallelise(model, nn.CrossEntropy(), 2, sequence="ring")

    def body(axes: Axes):
        p = full(model)
        with pytest.raises(ShapeError, match=r"sequence: dim 1 .* is 5, which is not a multiple of the 2 ranks"):
            planned.model.forward(environment(axes), p, np.zeros((2, 5), int))
        with pytest.raises(
            ShapeError, match=r"wants a part of tokens of shape \(samples, time <= 8\), got a part of \(2, 5\)"
        ):
            planned.model.forward(environment(axes), p, np.zeros((2, 10), int))

    on_axis(2, body)


@pytest.mark.world
@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["node", "mpi"])
@pytest.mark.parametrize("sequence", [None, "parallel", "ulysses", "ring"])
def test_under_mpi(sequence, backend):
    """The world is one tensor axis; two heads per rank and one more."""
    comm = open_world(backend)
    heads, time = 2 * comm.size + 1, 3 * comm.size + 1
    model, loss = nn.GPT(29, 2 * heads, 2, heads, time, dropout=0.1), nn.CrossEntropy()
    p = full(model)
    planned = nn.parallelise(model, loss, comm.size, sequence=sequence)
    axes = connect(Mesh(shard=1, tensor=comm.size), comm)
    mine = local(planned.model, p, comm.rank, comm.size)
    for length in (time, 1):  # 1: all ranks but the last have no positions
        x, target = np.random.default_rng(3).integers(0, 29, (2, 2, length))
        want = once(model, loss, p, x, target, environment())
        env = environment(axes, time=length)
        runs = comm.all_gather_object(once(planned.model, planned.loss, mine, x, target, env))
        check(planned, want, runs)
    axes.close()
    comm.close()
