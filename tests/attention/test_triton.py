"""The Triton kernels against the reference: on a GPU where there is one, else by Triton's interpreter on the CPU.

Without Triton (it comes with torch on a GPU) these tests are skipped; what its kernels are given is tested in
test_tile_lists.py everywhere.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from support.triton_here import GPU, triton_or_skip

triton_or_skip()

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from parts_by_hand import PartsByHand, Tensors  # noqa: E402

from support.plans import (  # noqa: E402
    KEEPS,
    attention_forest,
    nested_forks,
    one_segment_per_part,
    uniform,
)
from treetrain.check.forests import bushy_rows, forests, runs, seeded  # noqa: E402  # noqa: E402
from treetrain.check.linear import relative_error, rms  # noqa: E402
from treetrain.core.attention.attention import AttentionTree  # noqa: E402
from treetrain.core.attention.reference import reference_attention  # noqa: E402
from treetrain.core.attention.schedule import (  # noqa: E402
    PLAIN_ATTENTION,
    AttentionSpec,
    Forest,
)
from treetrain.core.tree.layout import (  # noqa: E402
    AttentionRange,
    PackedLayout,
    pack,
)
from treetrain.core.tree.token_tree import build_tree  # noqa: E402
from treetrain.kernels import triton_attention  # noqa: E402
from treetrain.kernels.backends import DeviceBackends  # noqa: E402
from treetrain.kernels.triton_attention import (  # noqa: E402
    Shape,
    Shapes,
    TritonTreeAttention,
    shapes_for,
)

DEVICE = torch.device("cuda" if GPU else "cpu")
SCALE = 0.4
NAMES = ("out", "dq", "dk", "dv", "dsinks")
SPECS = {
    "full": PLAIN_ATTENTION,
    "window of 1": AttentionSpec(AttentionRange(window=1)),
    "window of 13": AttentionSpec(AttentionRange(window=13)),
    "chunks of 8": AttentionSpec(AttentionRange(chunk=8)),
    "cap": AttentionSpec(softcap=1.5),
    "cap in a window": AttentionSpec(AttentionRange(window=5), softcap=50.0),
}
pytestmark = pytest.mark.slow


def inputs(tokens: int, *, heads=2, groups=1, size=8, value_size=None, sinks=False, dtype=torch.float32, seed=0):
    """Query, key, value, the output's gradient, and perhaps sinks."""
    generator = torch.Generator().manual_seed(seed)
    value_size = size if value_size is None else value_size
    shapes: list[tuple[int, ...]] = [(tokens, heads, size), (tokens, groups, size), (tokens, groups, value_size)]
    shapes += [(tokens, heads, value_size), *([(heads,)] if sinks else [])]
    # Rounded to bfloat16 first: the same numbers in every dtype.
    return [torch.randn(shape, generator=generator).bfloat16().to(DEVICE, dtype) for shape in shapes]


def both_ways(attend, tensors: Tensors) -> Tensors:
    """Output and the gradients of query, key, value and sinks."""
    leaves = [t.detach().clone().requires_grad_() for i, t in enumerate(tensors) if i != 3]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def by_reference(ends: np.ndarray, depth: np.ndarray, tensors: Tensors, spec: AttentionSpec) -> Tensors:
    def attend(q, k, v, sinks=None):
        where = {
            "depth": torch.from_numpy(depth),
            "window": spec.visible_range.window,
            "chunk": spec.visible_range.chunk,
        }
        return reference_attention(q, k, v, torch.from_numpy(ends), SCALE, **where, softcap=spec.softcap, sinks=sinks)

    return both_ways(attend, [t.cpu().double() for t in tensors])


def errors_of(
    forest: Forest, tensors: Tensors, spec: AttentionSpec = PLAIN_ATTENTION, tile: int = 32
) -> dict[str, float]:
    attention = TritonTreeAttention(forest, DEVICE, tile=tile)
    got = both_ways(lambda q, k, v, sinks=None: attention(q, k, v, SCALE, 0, spec, sinks), tensors)
    expected = by_reference(forest.ends, forest.depth, tensors, spec)
    return {name: relative_error(a.cpu(), b) for name, a, b in zip(NAMES, got, expected)}


def check(
    forest: Forest, tensors: Tensors, spec: AttentionSpec = PLAIN_ATTENTION, tile: int = 32, tolerance: float = 3e-6
) -> None:
    errors = errors_of(forest, tensors, spec, tile)
    assert max(errors.values()) <= tolerance, errors


@pytest.mark.parametrize("name", SPECS)
def test_random_forests_equal_the_reference(name):
    @seeded(f"triton {name}")
    @runs(8 if GPU else 4, derandomize=False)
    @given(forests(max_rows=10, max_length=30), st.sampled_from([16, 32]), st.integers(0, 99), st.booleans())
    def every_forest(rows, tile, seed, sinks):
        forest = attention_forest(rows)
        if len(forest.ends):
            check(forest, inputs(len(forest.ends), sinks=sinks, seed=seed), SPECS[name], tile)

    every_forest()


@pytest.mark.parametrize(
    "rows",
    [
        [[1]],
        [[1, 2, 3]],
        [[1, 2], [3, 4], [5], [6, 7, 8]],  # forks at the first token
        [[5], [6], [7], [8], [9]],
        [[*range(20)], [*range(10), 30], [*range(10), 31, 32], [*range(20), 33], [*range(20), 34]],
        [[*range(33)] * 3, [*range(33), 1, 2, 3]],
    ],
    ids=["one token", "one row", "forks at the first token", "single tokens", "forks", "more than a tile"],
)
def test_small_forests_equal_the_reference(rows):
    forest = attention_forest(rows)
    check(forest, inputs(len(forest.ends), heads=4, groups=2, sinks=True), tile=16)


def test_deep_chains_of_forks_equal_the_reference():
    forest = Forest.of(nested_forks(60))
    check(forest, inputs(len(forest.ends)))
    check(forest, inputs(len(forest.ends)), AttentionSpec(AttentionRange(window=7)))


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 2), (3, 1)])
def test_groups_of_query_heads_equal_the_reference(heads, groups):
    forest = attention_forest(bushy_rows(np.random.default_rng(0), rows=6, segment=7, levels=3))
    check(forest, inputs(len(forest.ends), heads=heads, groups=groups))


@pytest.mark.parametrize("size", [24, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_head_sizes_equal_the_reference(size, dtype):
    forest = attention_forest(bushy_rows(np.random.default_rng(1), rows=6, segment=9, levels=3))
    tensors = inputs(len(forest.ends), size=size, value_size=64 if size == 96 else None, dtype=dtype)
    # The interpreter cuts off the digits that bfloat16 lacks, always towards zero, where a GPU rounds.
    narrow = 2**-7 if GPU else 2**-6
    check(forest, tensors, tile=128, tolerance=3e-6 if dtype == torch.float32 else narrow)


def test_blocks_smaller_than_a_tile_equal_the_reference(monkeypatch):
    forest = attention_forest(bushy_rows(np.random.default_rng(2), rows=8, segment=9, levels=3))
    smaller = Shapes(Shape(16, 32, 4, 1), Shape(32, 16, 4, 1), Shape(16, 16, 4, 1))
    monkeypatch.setitem(triton_attention.SHAPES, (64, 4), smaller)
    assert shapes_for(16, torch.float32).forward.queries == 16
    check(forest, inputs(len(forest.ends), size=16, sinks=True), AttentionSpec(AttentionRange(window=11)), tile=64)
    check(forest, inputs(len(forest.ends), size=16), tile=64)


@pytest.mark.parametrize("size", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_setting_cuts_a_tile_into_whole_blocks(size, dtype):
    for s in shapes_for(size, dtype):
        assert 128 % s.queries == 0 and 128 % s.keys == 0 and s.warps in (4, 8)


@pytest.mark.parametrize(
    "spec",
    [PLAIN_ATTENTION, AttentionSpec(AttentionRange(window=9)), AttentionSpec(AttentionRange(chunk=7), softcap=2.0)],
    ids=str,
)
def test_parts_with_a_carry_equal_the_whole_tree(spec):
    """Paths of every length in front of a part, their gradients handed back in float32."""
    rng, seen = np.random.default_rng(0), set()
    for rows, keep in zip(([[*range(9), 1, 2], [*range(9), 3], [*range(4), 5, 6, 7]], *_bushy(rng, 2)), KEEPS):
        layout = pack(build_tree(rows), trim=False)
        for plan in (uniform(layout, 9, keep), one_segment_per_part(layout, keep)):
            tensors = [inputs(layout.num_tokens, sinks=True, seed=seed) for seed in range(2)]
            order = rng.permutation(int(plan.exported.sum()) + 3)
            got = PartsByHand(plan, tensors, _backend, order, SCALE, [spec, spec]).run()
            seen |= {len(plan.path(int(a))) for a in plan.attach if a >= 0}
            for layer, result in zip(tensors, got):
                expected = by_reference(layout.ends, layout.positions, layer, spec)
                errors = [relative_error(a.cpu(), b) for a, b in zip(result, expected)]
                assert max(errors) <= 3e-6, dict(zip(NAMES, errors))
    assert len(seen) > 5


def _bushy(rng, count: int):
    return [bushy_rows(rng, rows=5, segment=4, levels=3) for _ in range(count)]


def _backend(layout: PackedLayout, view):
    return TritonTreeAttention(Forest.of(layout), DEVICE, cache=view, tile=16)


def test_a_tree_in_bfloat16_is_as_close_as_its_rows_by_themselves():
    """Both by the same kernels: what the tree adds is the merging of branches."""
    tree, rows = [], []
    for seed in range(3):
        many = bushy_rows(np.random.default_rng(seed), rows=5, segment=6, levels=3)
        merged = attention_forest(many)
        alone = attention_forest([[1000 * k + token for token in row] for k, row in enumerate(many)])
        for forest, found in ((merged, tree), (alone, rows)):
            tensors = inputs(len(forest.ends), dtype=torch.bfloat16, seed=seed)
            found.append(list(errors_of(forest, tensors).values())[:4])
    for k, name in enumerate(NAMES[:4]):
        assert rms([e[k] for e in tree]) <= 1.5 * rms([e[k] for e in rows]), name


def test_two_runs_give_the_same_bits():
    forest = attention_forest(bushy_rows(np.random.default_rng(3), rows=8, segment=9, levels=3))
    tensors = inputs(len(forest.ends), heads=4, groups=1, sinks=True, dtype=torch.bfloat16)
    attention = TritonTreeAttention(forest, DEVICE, tile=32)
    first, second = (
        both_ways(lambda q, k, v, s: attention(q, k, v, SCALE, 0, PLAIN_ATTENTION, s), tensors) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_no_token_beyond_the_last_is_written():
    forest = attention_forest([[1, 2, 3], [1, 4]])
    attention = TritonTreeAttention(forest, DEVICE, tile=16)
    count = len(forest.ends)
    q, k, v = (x[:count].contiguous() for x in inputs(count)[:3])
    room = torch.full((count + 20, 2, 8), 7.0, device=DEVICE)
    room[:count] = q
    out = attention(room[:count], k, v, SCALE)
    assert (room[count:] == 7).all() and torch.isfinite(out).all()


def test_what_the_kernels_cannot_do_is_refused_by_name():
    forest = attention_forest([[1, 2, 3]])
    attention = TritonTreeAttention(forest, DEVICE)
    with pytest.raises(ValueError, match=r"torch\.float64"):
        attention(*inputs(3, dtype=torch.float64)[:3], SCALE)
    with pytest.raises(ValueError, match="heads of 264"):
        attention(*inputs(3, size=264)[:3], SCALE)


@pytest.mark.skipif(GPU, reason="asks for what a machine without GPU says")
def test_the_dispatcher_takes_the_kernels_when_told():
    forest = attention_forest([[1, 2, 3]])
    tree, given = AttentionTree(forest, backends=DeviceBackends()), inputs(3)[:3]
    tree(*given, SCALE, backend="triton")
    tree(*given, SCALE)
    assert tree.calls == {"triton": 1, "rectangles": 1}


@pytest.mark.skipif(not GPU, reason="counts what the compiler makes")
def test_one_compilation_serves_all_lengths():
    from treetrain.kernels.triton_kernels import forward_kernel

    def compiled() -> int:
        return sum(len(caches[0]) for caches in forward_kernel.device_caches.values())

    for length in (1, 16, 17, 300):
        forest = attention_forest([[*range(length)], [0, 5]])
        check(forest, inputs(len(forest.ends)), tile=128)
        if length == 1:
            first = compiled()
    assert compiled() == first


@pytest.mark.skipif(GPU, reason="a GPU's own compiler says it there")
def test_the_kernels_compile_for_hopper_within_its_shared_memory():
    """Triton compiles for a GPU that is not here; in a process that does not interpret."""
    script = Path(__file__).parents[2] / "benchmarks" / "triton_report.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, str(script), "--kernels", "attention", "--dtypes", "bfloat16", "--defaults"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 9 and all("wgmma" in line for line in lines), lines
    # Keys and values of the step after next are asked for before the next one waits for its own.
    assert all(line.endswith("fetches ahead") for line in lines), lines
