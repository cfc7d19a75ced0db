"""Random branching forests for hypothesis, and the training facts on them."""

import zlib
from collections.abc import Callable

import numpy as np
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st

from treetrain.layers.trajectory import Trajectory

VOCAB = 37
Rows = list[list[int]]


def seeded(name: str) -> Callable:
    """Give one case of a test its own examples: a derandomized test draws the same ones for all cases."""
    return seed(zlib.crc32(name.encode()))


def runs(examples: int, *, derandomize: bool = True) -> settings:
    """Settings for a number of examples; cases that are `seeded` must not be derandomized."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=derandomize,
        database=None,
        suppress_health_check=[*HealthCheck],  # type: ignore[arg-type]
    )


@st.composite
def forests(draw: st.DrawFn, *, max_rows: int = 7, max_length: int = 14) -> Rows:
    """Rows of token ids: forks (also at the first token), prefixes, duplicates, empty and one-token rows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.sampled_from(["mixed", "bushy", "comb", "star"]))
    length = draw(st.integers(2, max_length))
    count = draw(st.integers(1, max_rows))
    if shape == "bushy":  # few ids: random rows share by themselves and fork everywhere, the first token included
        return [rng.integers(0, 2, rng.integers(1, length + 1)).tolist() for _ in range(count)]
    trunk = rng.integers(0, VOCAB, length).tolist()
    if shape == "star":
        return [[*trunk, *rng.integers(0, VOCAB, rng.integers(0, 4)).tolist()] for _ in range(2 * count)]
    if shape == "comb":  # every row leaves the trunk one token later
        return [[*trunk[: i + 1], int(rng.integers(0, VOCAB))] for i in range(min(length, 2 * count))] + [trunk]
    rows = [trunk]
    for _ in range(count):
        base = rows[rng.integers(len(rows))]
        kind = draw(st.sampled_from(["branch", "branch", "duplicate", "prefix", "extend", "other", "empty", "single"]))
        at = int(rng.integers(0, len(base) + 1))
        tail = rng.integers(0, VOCAB, rng.integers(1, length + 1)).tolist()
        rows.append(
            {
                "branch": [*base[:at], *tail],
                "duplicate": list(base),
                "prefix": base[:at],
                "extend": [*base, *tail],
                "other": tail,
                "empty": [],
                "single": tail[:1],
            }[kind]
        )
    return rows


@st.composite
def trajectories(draw: st.DrawFn, *, max_rows: int = 7, max_length: int = 14) -> list[Trajectory]:
    """A random forest with facts that differ from row to row, about a quarter of the tokens untrained."""
    rows = draw(forests(max_rows=max_rows, max_length=max_length))
    return with_random_facts(rows, draw(st.integers(0, 2**32 - 1)))


def with_random_facts(rows: Rows, seed: int) -> list[Trajectory]:
    """Add facts to rows; at least one token of the batch is trained (a row is added if none can be)."""
    rng = np.random.default_rng(seed)
    later = np.random.default_rng([seed, 1])  # a second generator, so that these facts do not change the others
    rows = rows if any(len(row) > 1 for row in rows) else [*rows, [1, 2, 3]]
    longest = max(range(len(rows)), key=lambda k: len(rows[k]))
    dressed = []
    for k, row in enumerate(rows):
        n = len(row)
        weights = rng.uniform(0.3, 2.0, n) * (rng.random(n) > 0.25)
        if k == longest:
            weights[1] = 1.0
        elif rng.random() < 0.15:
            weights[:] = 0.0
        dressed.append(
            Trajectory(
                row,
                loss_weights=weights if k == longest or rng.random() < 0.8 else None,
                advantages=rng.normal(size=n) if rng.random() < 0.7 else float(rng.normal()),
                # Around log(1 / VOCAB): ratios on both sides of both clipping bounds.
                old_logprobs=rng.uniform(-4.4, -2.8, n),
                ref_logprobs=rng.uniform(-4.4, -2.8, n),
                rollout_logprobs=later.uniform(-4.4, -2.8, n),
                teacher_logprobs=later.uniform(-4.4, -2.8, n),
                group=k % 2,
                pair=k // 2,
                chosen=(k + k // 2) % 2 == 0,
            )
        )
    return dressed


def whole_pairs(rows: list[Trajectory]) -> list[Trajectory]:
    """Add a partner for the last row of `with_random_facts` if the number of rows is odd."""
    if len(rows) % 2 == 0:
        return rows
    last = rows[-1]
    assert last.ref_logprobs is not None
    weights, reference = np.linspace(0.5, 1.5, len(last)), last.ref_logprobs
    return [*rows, last.replace(loss_weights=weights, ref_logprobs=reference[::-1], chosen=not last.chosen)]


def bushy_rows(rng: np.random.Generator, *, rows: int, segment: int, levels: int, branch: int = 3) -> Rows:
    """Rows of ``levels`` segments of about ``segment`` tokens; at each level one of ``branch`` continuations."""
    choices = rng.integers(0, branch, (rows, levels))
    return [[token for level, c in enumerate(row) for token in _word(segment, level, int(c))] for row in choices]


def _word(segment: int, level: int, choice: int) -> list[int]:
    # Each choice has its own word, with its own length.
    length = max(1, segment + (7 * level + 3 * int(choice)) % 5 - 2)
    return [int(choice), *((level + 5 * int(choice) + i) % VOCAB for i in range(length - 1))]
