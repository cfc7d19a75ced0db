"""Very deep and very wide trees through a one-layer model on a CPU, in parts and as one part.

Run: python benchmarks/deep_trees.py [name ...] [--repeats 5] [--dry-run]

A chain of 10,000 nested forks (a leaf of one token hangs off every token of a path of 10,000: 5e7 flat tokens), and a
star of 10,000 leaves. Medians over the rounds; rows are appended to results/deep_trees.csv, and a case that has its row
at this commit is left out.
"""

import statistics
import time

import numpy as np

import rows

CASES = {
    "10,000 nested forks, 1024 tokens": ("forks", 10_000, 1024),
    "10,000 nested forks, 8192 tokens": ("forks", 10_000, 8192),
    "star of 10,000 leaves, no budget": ("star", 10_000, None),
    "star of 10,000 leaves, 1024 tokens": ("star", 10_000, 1024),
}


def nested_forks(count: int):
    """A path of `count` tokens with a leaf of one token at each; every leaf is a trajectory."""
    import treetrain as tt

    number = np.arange(1, count + 1)
    path = np.append(1, 93 + number % 30).astype(np.int32)
    leaves = [np.append(path[:depth], np.int32(2 + depth % 90)) for depth in number.tolist()]
    return tt.build_tree([*leaves, path])


def star(count: int):
    """`count` leaves of 1 to 20 tokens under one prompt of 100."""
    import treetrain as tt

    answers = [[100 + leaf, *range(leaf % 20)] for leaf in range(count)]
    weights = [[0.0] * 100 + [1.0] * len(answer) for answer in answers]
    return tt.build_tree(
        [tt.Trajectory([*range(100), *answer], loss_weights=own) for answer, own in zip(answers, weights)]
    )


def one_layer_model():
    """One layer of width 32 with two heads."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=10_112,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def measure(name: str, repeats: int, dry_run: bool) -> None:
    """Run one case and append its row."""
    if not dry_run and rows.has("deep_trees", case=name):
        return print(f"{name}: has its row at this commit")
    import treetrain as tt
    from treetrain.losses import sft

    kind, count, budget = CASES[name]
    model, clocks = one_layer_model(), []
    for _ in range(repeats):
        model.zero_grad()
        start = time.perf_counter()
        tree = nested_forks(count) if kind == "forks" else star(count)
        built = time.perf_counter()
        engine = tt.TreeEngine(model, budget=budget)
        plan = engine.plan(tree)
        planned = time.perf_counter()
        result = engine.forward_backward(tree, sft())
        clocks.append((built - start, planned - built, time.perf_counter() - planned))
    build, planning, step = zip(*clocks)
    row = {
        "case": name,
        "trajectories": tree.num_trajectories,
        "flat_tokens": tree.num_flat_tokens,
        "unique_tokens": tree.num_tokens,
        "longest_path": int(tree.trajectory_length.max()),
        "segments": tree.num_segments,
        "parts": plan.num_parts,
        "recomputed": plan.recomputed_tokens,
        "rounds": repeats,
        "build_seconds": f"{statistics.median(build):.2f}",
        "plan_seconds": f"{statistics.median(planning):.2f}",
        "step_seconds": f"{statistics.median(step):.2f}",
        "step_seconds_min": f"{min(step):.2f}",
        "step_seconds_max": f"{max(step):.2f}",
        "loss": f"{result.loss:.6f}",
    }
    rows.report("deep_trees", row, dry_run=dry_run)


if __name__ == "__main__":
    rows.run_each(CASES, measure, __doc__, repeats=rows.count(5), dry_run=rows.DRY_RUN)
