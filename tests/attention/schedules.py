"""Coverage of an attention schedule, counted pair by pair; forests given by each token's parent."""

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from treetrain.check.linear import relative_error
from treetrain.core.attention.reference import visible
from treetrain.core.attention.schedule import Forest, Schedule
from treetrain.core.tree.token_tree import segments


def coverage(schedule: Schedule) -> np.ndarray:
    """How often each (query, key) pair is computed, [N, N]."""
    count = np.zeros((schedule.num_tokens, schedule.num_tokens), dtype=np.int64)
    for start, stop in schedule.chains:
        count[start:stop, start:stop] += np.tri(stop - start, dtype=np.int64)
    for q0, q1, k0, k1 in schedule.rectangles:
        count[q0:q1, k0:k1] += 1
    for batch in schedule.batches:
        for c, length in enumerate(batch.query_length):
            mask = batch.mask[c]
            for slot in range(length):
                np.add.at(count, (batch.query_index[c, slot], batch.key_index[c, mask[slot]]), 1)
    return count


def first_pass(schedule: Schedule) -> np.ndarray:
    """How often each query is written (chains, batches) before rectangles are merged into it, [N]."""
    count = np.zeros(schedule.num_tokens, dtype=np.int64)
    for start, stop in schedule.chains:
        count[start:stop] += 1
    for batch in schedule.batches:
        for index, length in zip(batch.query_index, batch.query_length):
            np.add.at(count, index[:length], 1)
    return count


def check(forest: Forest, schedule: Schedule) -> None:
    """Every visible pair is computed once, no other one is, and every query is first written once."""
    truth = visible(torch.from_numpy(forest.ends)).numpy()
    np.testing.assert_array_equal(coverage(schedule), truth)
    assert (first_pass(schedule) == 1).all()


def pairs_computed(schedule: Schedule) -> int:
    """Unmasked pairs in all calls; together with `first_pass` the check for forests too large for `check`."""
    pairs = sum((stop - start) * (stop - start + 1) // 2 for start, stop in schedule.chains)
    pairs += sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1 in schedule.rectangles)
    for batch in schedule.batches:
        filled = np.arange(batch.query_index.shape[1]) < batch.query_length[:, None]
        pairs += int((batch.mask & filled[:, :, None]).sum())
    return pairs


def calls(schedule: Schedule) -> int:
    """Attention calls in each direction."""
    return len(schedule.chains) + len(schedule.rectangles) + len(schedule.batches)


def forest_from_parents(parent: np.ndarray) -> Forest:
    """The forest of tokens in pre-order, each given by its parent (-1 at roots)."""
    above = parent.tolist()
    count = len(above)
    ends, depth = list(range(1, count + 1)), [0] * count
    for token, p in enumerate(above):
        depth[token] = depth[p] + 1 if p >= 0 else 0
    for token in range(count - 1, -1, -1):
        if above[token] >= 0:
            ends[above[token]] = max(ends[above[token]], ends[token])
    start, of = segments(parent)
    return Forest(ends=np.array(ends), depth=np.array(depth), segment_start=start, segment_parent=of)


def comb(chain: int, legs: dict[int, list[list[int]]]) -> list[int]:
    """Parents of a chain with light subtrees (parents of their own, -1 at their roots) below some of its tokens."""
    parent = list(range(-1, chain - 1))
    for token in sorted(legs, reverse=True):
        for leg in legs[token]:
            base = len(parent)
            parent += [token if p < 0 else base + p for p in leg]
    return parent


def straight(length: int) -> list[int]:
    """Parents of one row."""
    return list(range(-1, length - 1))


def regular_comb(chain: int, every: int, leg: int) -> Forest:
    """A chain with a straight leg below every `every`-th token, the last one of the chain excepted."""
    return forest_from_parents(np.array(comb(chain, {i: [straight(leg)] for i in range(every - 1, chain - 1, every)})))


def star(stem: int, leaves: int, leg: int) -> Forest:
    """A stem with straight leaves at its end."""
    return forest_from_parents(np.array(comb(stem, {stem - 1: [straight(leg)] * leaves})))


@st.composite
def combs(draw: st.DrawFn, *, max_chain: int = 60, max_leg: int = 6) -> Forest:
    """Several trees, each a chain with light subtrees at many tokens: single tokens, rows, small trees, small combs."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    density = draw(st.sampled_from([0.2, 0.6, 1.0]))
    longest = draw(st.sampled_from([1, max_leg, 5 * max_leg]))
    parent: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        chain = draw(st.integers(1, max_chain))
        base = len(parent)
        parent += [p if p < 0 else base + p for p in random_comb(rng, chain, density, longest)]
    return forest_from_parents(np.array(parent))


def random_comb(rng: np.random.Generator, chain: int, density: float, longest: int) -> list[int]:
    """Parents of a chain with random small subtrees at a share `density` of its tokens."""
    legs = {}
    for token in range(chain):
        if rng.random() < density:
            legs[token] = [_leg(rng, int(rng.integers(1, longest + 1))) for _ in range(rng.integers(1, 4))]
    return comb(chain, legs)


def _leg(rng: np.random.Generator, size: int) -> list[int]:
    kind = rng.integers(3)
    if kind == 0:
        return straight(size)
    if kind == 1:
        return comb(size, {i: [straight(1)] for i in range(size) if rng.random() < 0.5})
    parent, path = [], []
    for token in range(size):
        path = path[: max(1, len(path) - int(rng.geometric(0.6)) + 1)]
        parent.append(path[-1] if path else -1)
        path.append(token)
    return parent


def errors_of_each(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[float]:
    """Relative errors of an output and its gradients.

    Where a gradient must be 0, as those of the scores where every token sees one key, it is compared with the output's
    size: whether rounding leaves exactly 0 depends on the processor.
    """
    scale = float(expected[0].double().norm())
    return [relative_error(a, b) if b.any() else float(a.double().norm()) / scale for a, b in zip(found, expected)]
