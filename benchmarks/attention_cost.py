"""Time of tree attention against plain causal attention over the same number of tokens, forward plus backward.

Run: python benchmarks/attention_cost.py. CPU, float32, 6 query and 2 key/value heads of size 64; the two alternate in
one process. Plain causal attention is one stock call over as many tokens as the tree has, as if they were one row.
Rows are appended to results/attention_cost.csv.
"""

import functools
import os
import statistics
import time

import torch

import rows
import treetrain as tt
from treetrain.core.attention.rectangles import RectangleAttention
from treetrain.core.attention.schedule import Forest
from treetrain.core.tree.layout import PackedLayout, pack
from workloads import shaped

HEADS, KV_HEADS, SIZE, REPEATS = 6, 2, 64, 15


def random_tree(leaves: int, path: int, seed: int = 0) -> list[list[int]]:
    """Rows of ``path`` tokens that fork from earlier ones at random positions: overlap about three quarters."""
    generator = torch.Generator().manual_seed(seed)
    made: list[list[int]] = []
    for number in range(leaves):
        row = torch.randint(0, 10_000, (path,), generator=generator).tolist()
        if number:
            other = made[int(torch.randint(number, (1,), generator=generator))]
            keep = int(path * (0.5 + 0.5 * torch.rand(1, generator=generator).item()))
            row[:keep] = other[:keep]
        made.append(row)
    return made


def comb(chain: int, every: int, leg: int) -> list[list[int]]:
    """A long row with short branches at regular intervals, as in rollouts with retries."""
    trunk = [token % 10_000 for token in range(chain)]
    legs = [[*trunk[:at], *([10_000] * leg)] for at in range(every, chain, every)]
    return [trunk, *legs]


def layouts() -> dict[str, PackedLayout]:
    """Trees: the efficiency benchmark's real ones, and synthetic ones of long paths."""
    found = {}
    for name in ("tau_airline_calls_48", "tot_game24", "codet_humaneval"):
        real = shaped(name)
        tree = tt.build_tree(real)
        found[name.removesuffix("_48")] = pack(tree, tree.trained_edges()[0] > 0)
    for leaves, path in ((12, 2048), (64, 512)):
        found[f"random {leaves} x {path}"] = pack(tt.build_tree(random_tree(leaves, path)))
    for chain, every, leg in ((4096, 10, 5), (3000, 1, 2)):
        found[f"comb {chain}, {leg} at every {every}"] = pack(tt.build_tree(comb(chain, every, leg)))
    return found


def seconds(run, inputs: list[torch.Tensor], grad: torch.Tensor) -> float:
    """One forward and backward."""
    start = time.perf_counter()
    torch.autograd.grad(run(*inputs), inputs, grad)
    return time.perf_counter() - start


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Stock causal attention on [N, heads, D]."""
    heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def main() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    rows.keep_memory()
    for name, layout in layouts().items():
        forest = Forest(
            ends=layout.ends,
            depth=layout.positions,
            segment_start=layout.segment_start,
            segment_parent=layout.segment_parent,
        )
        attention = RectangleAttention(forest, heads_times_size=HEADS * SIZE)
        tokens = layout.num_tokens
        inputs = [torch.randn(tokens, heads, SIZE, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        grad = torch.randn(tokens, HEADS, SIZE)
        tree_run = functools.partial(attention, scale=SIZE**-0.5)
        pairs = [(seconds(tree_run, inputs, grad), seconds(plain, inputs, grad)) for _ in range(REPEATS + 2)]
        tree_times, plain_times = zip(*pairs[2:])
        ratio = statistics.median(a / b for a, b in pairs[2:])
        schedule = attention.schedule
        row = {
            "tree": name,
            "tokens": tokens,
            "visible_pairs": layout.pairs,
            "causal_pairs": tokens * (tokens + 1) // 2,
            "calls": len(schedule.chains) + len(schedule.rectangles) + len(schedule.batches),
            "tree_ms": f"{1e3 * statistics.median(tree_times):.2f}",
            "causal_ms": f"{1e3 * statistics.median(plain_times):.2f}",
            "ratio": f"{ratio:.3f}",
            "repeats": REPEATS,
        }
        rows.append("attention_cost", row)
        print(row, flush=True)


if __name__ == "__main__":
    main()
