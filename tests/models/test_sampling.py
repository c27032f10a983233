"""Which token is chosen: each rule by hand, and draws that follow the probabilities."""

import numpy as np
import pytest

from fsdpx.core.array.random import uniform
from fsdpx.models.generation.texts import NO_TOKEN, Sampling, find_context_start

LOGITS = np.log([0.4, 0.3, 0.2, 0.1])


def drawn(sampling, count=400):
    return np.bincount([sampling.pick_token(LOGITS, [0], 0, i) for i in range(count)], minlength=4) / count


def test_draws_follow_the_probabilities():
    np.testing.assert_allclose(drawn(Sampling(1.0)), [0.4, 0.3, 0.2, 0.1], atol=0.06)
    np.testing.assert_allclose(drawn(Sampling(0.5)), np.array([16, 9, 4, 1]) / 30, atol=0.06)
    np.testing.assert_allclose(drawn(Sampling(1.0, top_k=2)), [4 / 7, 3 / 7, 0, 0], atol=0.06)
    np.testing.assert_allclose(drawn(Sampling(1.0, top_p=0.75)), [4 / 9, 3 / 9, 2 / 9, 0], atol=0.06)
    np.testing.assert_allclose(drawn(Sampling(1.0, top_p=1.0)), drawn(Sampling(1.0)))


def test_greedy_takes_the_first_of_the_most_likely_and_a_penalty_pushes_it_down():
    assert Sampling().pick_token(np.array([1.0, 2.0, 2.0]), [], 0, 0) == 1
    assert Sampling(repetition_penalty=2.0).pick_token(np.array([1.5, 2.0, -1.0]), [1, 1, 2], 0, 0) == 0
    assert Sampling(repetition_penalty=2.0).pick_token(np.array([-1.5, -1.0]), [1], 0, 0) == 0


def test_a_draw_is_a_function_of_seed_row_and_number():
    flat = np.zeros(1000)
    one = Sampling(1.0, seed=4).pick_token(flat, [1], 2, 3)
    assert one == Sampling(1.0, seed=4).pick_token(flat, [5, 6], 2, 3)
    others = [Sampling(1.0, seed=5).pick_token(flat, [1], 2, 3), Sampling(1.0, seed=4).pick_token(flat, [1], 3, 3)]
    assert one not in [*others, Sampling(1.0, seed=4).pick_token(flat, [1], 2, 4)]


def plainly(sampling, logits, number):
    """A draw that sorts all tokens."""
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    order = np.argsort(-weights, kind="stable")[: sampling.top_k]
    sums = np.cumsum(weights[order])
    order = np.sort(order[: np.searchsorted(sums, (sampling.top_p or 1.0) * sums[-1]) + 1])
    draw = uniform(sampling.seed, "generate", number, number + 1)[0]
    return int(order[np.searchsorted(np.cumsum(weights[order]), draw * weights[order].sum(), side="right")])


@pytest.mark.parametrize("top_k", [None, 1, 5, 70, 900])
@pytest.mark.parametrize("top_p", [None, 0.01, 0.5, 0.99])
def test_without_sorting_all_tokens_the_same_are_drawn(top_k, top_p):
    """Of many equal logits, and of flat ones, where a guess of how many are likely is too small."""
    rng = np.random.default_rng(0)
    for number, width in enumerate([0.1, 1.0, 4.0] * 10):
        logits = np.round(rng.normal(0, width, 700), 1)
        sampling = Sampling(0.8, top_k, top_p)
        assert sampling.pick_token(logits, [], 0, number) == plainly(sampling, logits, number)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_give_no_token(bad):
    assert Sampling().pick_token(np.array([1.0, bad]), [], 0, 0) == NO_TOKEN


def test_a_full_context_leaves_out_its_older_half():
    assert [find_context_start(n, 8) for n in (1, 8, 9, 12, 13, 16, 17)] == [0, 0, 4, 4, 8, 8, 12]
    assert [find_context_start(n, 1) for n in (1, 2, 3)] == [0, 1, 2]
