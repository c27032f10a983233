"""Ranges, pages, cuts and the canonical tree."""

import re

from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.core.array.sums import CHUNK_ELEMENTS
from fsdpx.core.state.flat_parameters import ElementRange, Page, intersect_ranges, split_page_into_shard_ranges
from fsdpx.core.state.gradients import (
    PairwiseSumStack,
    TreeNode,
    cover_chunks_with_tree_nodes,
    get_chunks_of_rank,
    get_root_node,
)

CHECK = settings(max_examples=examples(200), derandomize=True, database=None, deadline=None)


@st.composite
def cuts(draw, size):
    edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=6))})
    return [ElementRange(a, b) for a, b in zip(edges, edges[1:], strict=False)]


@given(st.data(), st.integers(1, 60))
@CHECK
def test_overlap_covers_every_element_once(data, size):
    have, want = data.draw(cuts(size)), data.draw(cuts(size))
    seen = []
    for piece in intersect_ranges(have, want):
        for i in range(piece.start, piece.stop):
            assert have[piece.have].start <= i < have[piece.have].stop
            assert want[piece.want].start <= i < want[piece.want].stop
            seen.append(i)
    assert seen == list(range(size))


def test_overlap_skips_gaps():
    found = intersect_ranges([ElementRange(0, 3), ElementRange(6, 9)], [ElementRange(2, 7)])
    assert [(piece.start, piece.stop) for piece in found] == [(2, 3), (6, 7)]


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6), st.integers(1, 9), st.booleans())
@CHECK
def test_cuts_tile_the_page_without_padding(sizes, width, snap):
    page = Page.from_shapes(0, [(f"p{i}", (n,)) for i, n in enumerate(sizes)], True)
    shards = split_page_into_shard_ranges(page, width, snap)
    assert len(shards) == width
    assert shards[0].start == 0
    assert shards[-1].stop == page.size == sum(sizes)
    assert all(a.stop == b.start for a, b in zip(shards, shards[1:], strict=False))
    if snap:
        edges = {f.offset + i for f in page.fields for i in range(0, f.size, CHUNK_ELEMENTS)} | {page.size}
        assert {s.start for s in shards} <= edges | {0}
    else:
        assert max(s.size for s in shards) - min(s.size for s in shards) <= 1


@given(st.integers(1, 40), st.data())
@CHECK
def test_nodes_cover_a_run_exactly(chunks, data):
    a = data.draw(st.integers(0, chunks))
    b = data.draw(st.integers(a, chunks))
    nodes = cover_chunks_with_tree_nodes(chunks, range(a, b))
    leaves = [range(node.index << node.level, (node.index + 1) << node.level) for node in nodes]
    assert [c for run in leaves for c in run if c < chunks] == list(range(a, b))
    assert len(nodes) <= 2 * chunks.bit_length()


@given(st.integers(1, 64), st.integers(1, 12))
@CHECK
def test_any_spread_over_ranks_adds_all_in_one_order(chunks, ranks):
    """Sums as text show the order of additions: one rank and many ranks must write the same text."""

    def add(nodes):
        stack = PairwiseSumStack(chunks, lambda left, right: f"({left}+{right})")
        for node, text in nodes:
            stack.push_node(node, text)
        return stack

    leaves = [(TreeNode(0, c), str(c)) for c in range(chunks)]
    parts = []
    for mine in (get_chunks_of_rank(chunks, r, ranks) for r in range(ranks)):
        part = add(leaves[mine.start : mine.stop]).entries
        assert tuple(node for node, _ in part) == cover_chunks_with_tree_nodes(chunks, mine)
        parts += part
    ((root, text),) = add(leaves).entries
    assert add(parts).entries == [(root, text)]
    assert root == get_root_node(chunks)
    assert [int(c) for c in re.findall(r"\d+", text)] == list(range(chunks))
