"""Other ways to train on rows that share prefixes, beside this library, on the same rows and model, in one process.

Run: python benchmarks/rivals.py [work ...] [--repeats 5] [--layers 14] [--dry-run]. Half an hour on two quiet cores; a
work that has its rows at this commit is left out, so a run that was stopped goes on where it was.

Each rival is written here from its paper or its public description, in its simplest right form, on an unmodified
Hugging Face model whose attention function is replaced through transformers' own interface:

- rows: every row that no other row extends, with the weights of those it contains, packed without padding. The fastest
  way without a tree; LinearEngine of this library.
- each row: the same for every row as it is given.
- dense mask: the tree as one packed sequence with an additive mask [N, N], as most tree attention does it.
- flex: the tree as one packed sequence, by PyTorch's FlexAttention with the mask as a function (on a GPU: it has no
  backward on CPUs).
- prefix groups: prefixes of depth one, as PrefixGrouper (verl) and Unsloth share them: rows of a group attend to one
  copy of their common prefix. Groups are chosen to compute the fewest tokens.
- segments: depth first, segment by segment against a cache of keys and values, as AReaL-DTA (arXiv 2602.00482) runs
  trees: graphs of one path are alive, and gradients of cached keys are handed up.
- tree: this library.

Time is of forward and backward of SFT, medians over rounds in which all take turns; memory is the peak of a step in a
process of its own; the error is that of the gradients against every row by itself in float64. Rows are appended to
results/rivals.csv. Trees have the shapes of real trajectories (benchmarks/shapes), those of workloads.py.
"""

import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

import rows as result_rows
import treetrain as tt
from memory import _status_bytes, _touch_weights_and_gradients
from treetrain.check.bench import PaddedEngine
from treetrain.check.linear_engine import LinearEngine
from treetrain.models.work import cheapest_rows, linear_work, tree_work
from workloads import VOCAB, WORKLOADS, load_workload, qwen3_model

PACKED = 4096
"""Tokens of a pass of the rivals that run rows, or groups of rows."""


def gradients(model: nn.Module) -> Tensor:
    """All gradients of a model, float64."""
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


@contextmanager
def attention(model: nn.Module, function: Callable[..., Tensor]) -> Iterator[None]:
    """Within the block the model's layers call `function(layer, q, k, v)`, all of them [1, heads, N, D]."""

    def forward(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any):
        groups = query.shape[1] // key.shape[1]
        out = function(module.layer_idx, query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
        return out.transpose(1, 2), None

    AttentionInterface.register("rival", forward)
    before = model.config._attn_implementation
    model.set_attn_implementation("rival")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class Pass:
    """Tokens that go through the model together, and the predictions that read their hidden states.

    Args:
        ids, positions: of the tokens.
        states: for every prediction, the token whose hidden state makes it.
        targets, weights: the predicted ids, and their loss weights.
    """

    def __init__(self, ids: Any, positions: Any, states: Any, targets: Any, weights: Any):
        whole = (torch.from_numpy(np.asarray(x).astype(np.int64)) for x in (ids, positions, states, targets))
        self.ids, self.positions, self.states, self.targets = whole
        self.weights = torch.from_numpy(np.asarray(weights, np.float64))

    @classmethod
    def of_tokens(cls, tree: tt.TokenTree, tokens: np.ndarray, weight: np.ndarray) -> "Pass":
        """Some tokens of a tree, and the predictions that they make."""
        place = np.full(tree.num_tokens, -1)
        place[tokens] = np.arange(len(tokens))
        edges = np.flatnonzero((weight > 0) & (tree.parent >= 0))
        edges = edges[place[tree.parent[edges]] >= 0]
        states = place[tree.parent[edges]]
        return cls(tree.tokens[tokens], tree.depth[tokens], states, tree.tokens[edges], weight[edges])

    def loss(self, model: nn.Module) -> Tensor:
        """The weighted sum of minus the log-probabilities of the predictions; a state at a fork makes several."""
        hidden = model.model(
            input_ids=self.ids[None], position_ids=self.positions[None], attention_mask=None, use_cache=False
        ).last_hidden_state[0]
        states, place = torch.unique(self.states, return_inverse=True)
        if not len(states):
            return hidden.sum() * 0
        total = hidden.new_zeros(())
        for start in range(0, len(states), 1024):  # chunks, as every trainer that knows its memory does
            inside = (place >= start) & (place < start + 1024)
            logits = model.lm_head(hidden[states[start : start + 1024]]).float()
            picked = logits.log_softmax(-1)[place[inside] - start, self.targets[inside]]
            total = total - (picked * self.weights[inside]).sum()
        return total


class Rival:
    """One way to compute the gradients of a step. `step` adds them to ``.grad``; the sum is divided by all weights."""

    def __init__(self, model: nn.Module, rows: Sequence[tt.Trajectory]):
        self.model, self.rows = model, rows
        self.tree = tt.build_tree(rows)
        self.weight = summed_weights(self.tree, rows)
        self.total = float(sum(row.weights[1:].sum() for row in rows))
        self.prepare()

    def prepare(self) -> None:
        """Plan the passes; part of a step in training, but small."""

    def step(self) -> None:
        raise NotImplementedError


def summed_weights(tree: tt.TokenTree, rows: Sequence[tt.Trajectory]) -> np.ndarray:
    """The loss weight of every tree token, summed over the rows through it."""
    weight = np.zeros(tree.num_tokens)
    for number, row in enumerate(rows):
        weight[tree.path(number)] += row.weights
    return weight


class DenseMask(Rival):
    """The whole tree under a mask of N x N numbers."""

    def prepare(self) -> None:
        n = self.tree.num_tokens
        ends, index = torch.from_numpy(self.tree.end.astype(np.int64)), torch.arange(n)
        visible = (index[None] <= index[:, None]) & (index[:, None] < ends[None])
        self.mask = torch.zeros(n, n).masked_fill_(~visible, float("-inf"))
        self.whole = Pass.of_tokens(self.tree, np.arange(n), self.weight)

    def step(self) -> None:
        def masked(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask.to(q.dtype))

        with attention(self.model, masked):
            (self.whole.loss(self.model) / self.total).backward()


class Flex(Rival):
    """The whole tree by FlexAttention, compiled once."""

    def prepare(self) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        device = next(self.model.parameters()).device
        if device.type == "cpu":
            raise NotImplementedError("FlexAttention has no backward on a CPU")
        ends = torch.from_numpy(self.tree.end.astype(np.int64)).to(device)

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < ends[k])

        n = self.tree.num_tokens
        self.block_mask = create_block_mask(visible, None, None, n, n, device=device)
        self.flex = torch.compile(flex_attention)
        self.whole = Pass.of_tokens(self.tree, np.arange(n), self.weight)

    def step(self) -> None:
        with attention(self.model, lambda _, q, k, v: self.flex(q, k, v, block_mask=self.block_mask)):
            (self.whole.loss(self.model) / self.total).backward()


class PrefixGroups(Rival):
    """Rows in groups, each with one copy of the prefix that all of its rows share, several groups a pass."""

    def prepare(self) -> None:
        self.rows = cheapest_rows(self.tree)
        self.tree = tt.build_tree(self.rows)
        self.passes: list[tuple[Pass, list[tuple[int, list[int]]]]] = []
        pending: list[tuple[int, list[int]]] = []
        size = 0
        for prefix, members in fewest_tokens(self.tree):
            depth = 0 if prefix < 0 else int(self.tree.depth[prefix]) + 1
            more = depth + sum(len(self.rows[number]) - depth for number in members)
            if pending and size + more > PACKED:
                self.passes.append(self._packed(pending))
                pending, size = [], 0
            pending.append((depth, members))
            size += more
        self.passes.append(self._packed(pending))

    def _packed(self, groups: list[tuple[int, list[int]]]) -> tuple[Pass, list[tuple[int, list[int]]]]:
        """The pass of some groups, and for each the length of its prefix and those of what follows it in each row."""
        columns: list[list[np.ndarray]] = [[], [], [], [], []]
        shape, at = [], 0

        def add(row: tt.Trajectory, start: int, stop: int, weights: np.ndarray, before: int) -> None:
            """Tokens of a row from `start` on, the first of which is predicted from the state `before`."""
            nonlocal at
            trained = np.flatnonzero(weights[start:stop] > 0) + start
            trained = trained[trained > 0]
            states = np.where(trained == start, before, at + trained - start - 1)
            found = row.ids[start:stop], np.arange(start, stop), states, row.ids[trained], weights[trained]
            for column, values in zip(columns, found):
                column.append(values)
            at += stop - start

        for depth, members in groups:
            rows = [self.rows[number] for number in members]
            add(rows[0], 0, depth, np.sum([row.weights[:depth] for row in rows], 0), -1)
            last = at - 1
            for row in rows:
                add(row, depth, len(row), row.weights, last)
            shape.append((depth, [len(row) - depth for row in rows]))
        return Pass(*(np.concatenate(column) for column in columns)), shape

    def step(self) -> None:
        for one, shape in self.passes:

            def grouped(_: int, q: Tensor, k: Tensor, v: Tensor, shape: Any = shape) -> Tensor:
                pieces, at = [], 0
                for depth, tails in shape:
                    prefix = slice(at, at + depth)
                    at += depth
                    if depth:
                        pieces.append(causal(q[:, :, prefix], k[:, :, prefix], v[:, :, prefix]))
                    for length in tails:
                        tail = slice(at, at + length)
                        at += length
                        if length:
                            keys, values = (torch.cat([x[:, :, prefix], x[:, :, tail]], 2) for x in (k, v))
                            pieces.append(causal(q[:, :, tail], keys, values))
                return torch.cat(pieces, 2)

            with attention(self.model, grouped):
                (one.loss(self.model) / self.total).backward()


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last queries of the keys' sequence."""
    if q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def fewest_tokens(tree: tt.TokenTree) -> list[tuple[int, list[int]]]:
    """(last token of the common prefix or -1, rows) of the groups of depth one that compute the fewest tokens.

    For every fork either all rows below it are one group, or its children's best groups are kept.
    """
    below: dict[int, list[int]] = {}
    for number, last in enumerate(tree.trajectory_last.tolist()):
        below.setdefault(last, []).append(number)
    length = tree.trajectory_length.tolist()
    best: dict[int, tuple[int, list[tuple[int, list[int]]], list[int]]] = {}
    for token in reversed(range(tree.num_tokens)):
        children = [best.pop(child) for child in _children(tree, token)]
        rows = below.get(token, []) + [row for child in children for row in child[2]]
        apart = sum(child[0] for child in children) + sum(length[row] for row in below.get(token, []))
        groups = [group for child in children for group in child[1]]
        groups += [(-1, [row]) for row in below.get(token, [])]
        depth = int(tree.depth[token]) + 1
        together = depth + sum(length[row] - depth for row in rows)
        best[token] = (together, [(token, rows)], rows) if together < apart else (apart, groups, rows)
    return [group for root in np.flatnonzero(tree.parent < 0).tolist() for group in best[root][1]]


def _children(tree: tt.TokenTree, token: int) -> list[int]:
    child, found = token + 1, []
    while child < tree.end[token]:
        found.append(child)
        child = int(tree.end[child])
    return found


class Segments(Rival):
    """Depth first, a segment at a time; keys and values of the path are leaves whose gradients their segments take."""

    def prepare(self) -> None:
        self.children: dict[int, list[int]] = {-1: []}
        self.passes: list[Pass] = []
        parents: list[int] = []
        number = np.full(self.tree.num_tokens, -1)
        start = 0
        n = self.tree.num_tokens
        while start < n:
            stop = start + 1
            # A run goes on while the next token in pre-order is the only child of the one before it.
            while stop < n and self.tree.parent[stop] == stop - 1 and self.tree.end[stop] == self.tree.end[stop - 1]:
                stop += 1
            number[start:stop] = len(self.passes)
            parent = int(self.tree.parent[start])
            parents.append(-1 if parent < 0 else int(number[parent]))
            self.passes.append(Pass.of_tokens(self.tree, np.arange(start, stop), self.weight))
            start = stop
        for child, parent in enumerate(parents):
            self.children.setdefault(parent, []).append(child)
            self.children.setdefault(child, [])

    def step(self) -> None:
        layers = len(self.model.model.layers)
        path: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(layers)]
        made: list[Any] = []  # keys and values of the segment that runs, by layer

        def cached(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            made.append((k, v))
            keys, values = (torch.cat([*(kv[i] for kv in path[layer]), x], 2) for i, x in ((0, k), (1, v)))
            return causal(q, keys, values)

        stack = [(root, False) for root in reversed(self.children[-1])]
        alive: dict[int, Any] = {}
        while stack:
            segment, done = stack.pop()
            if not done:
                made = []
                with attention(self.model, cached):
                    loss = self.passes[segment].loss(self.model) / self.total
                below = self.children[segment]
                leaves = [tuple(x.detach().requires_grad_() for x in kv) for kv in made] if below else []
                for layer, kv in enumerate(leaves):
                    path[layer].append(kv)
                alive[segment] = loss, made, leaves
                stack.append((segment, True))
                stack += [(child, False) for child in reversed(below)]
                continue
            loss, made, leaves = alive.pop(segment)
            outputs, grads = [loss], [torch.ones_like(loss)]
            for layer, kv in enumerate(leaves):
                path[layer].pop()
                for out, leaf in zip(made[layer], kv):
                    if leaf.grad is not None:
                        outputs.append(out)
                        grads.append(leaf.grad)
            torch.autograd.backward(outputs, grads)


class Ours(Rival):
    """This library."""

    engine_type: Any = tt.TreeEngine
    options: Mapping[str, Any] = {}

    def prepare(self) -> None:
        self.engine = self.engine_type(self.model, check=False, **self.options)

    def step(self) -> None:
        self.engine.forward_backward(self.rows, tt.losses.sft(), normaliser=self.total)


class MergedRows(Ours):
    """Rows that no other row extends, packed."""

    engine_type, options = LinearEngine, {"pack_tokens": PACKED}

    def prepare(self) -> None:
        super().prepare()
        self.rows = cheapest_rows(self.tree)


class PaddedRows(MergedRows):
    """The same rows, padded."""

    engine_type = PaddedEngine


class EachRow(Ours):
    """Every row, packed."""

    engine_type, options = LinearEngine, {"pack_tokens": PACKED}


RIVALS: dict[str, type[Rival]] = {
    "rows": MergedRows,
    "each row": EachRow,
    "dense mask": DenseMask,
    "flex": Flex,
    "prefix groups": PrefixGroups,
    "segments": Segments,
    "tree": Ours,
}


def make(work: str, layers: int) -> tuple[nn.Module, list[tt.Trajectory]]:
    """The model and the rows of a work."""
    return qwen3_model(layers=layers, vocab_size=VOCAB), load_workload(work)


def reference_gradients(model: nn.Module, rows: Sequence[tt.Trajectory]) -> Tensor:
    """The gradients of every row by itself, by the plain model in float64."""
    model.double()
    total = float(sum(row.weights[1:].sum() for row in rows))
    for row in rows:
        ids = torch.from_numpy(row.ids.astype(np.int64))[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        picked = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        (-(picked * torch.from_numpy(row.weights[1:])).sum() / total).backward()
    return gradients(model)


def peak_bytes(name: str, work: str, layers: int) -> int:
    """Peak bytes of a step above model and gradients, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_peak, args=(sender, name, work, layers, torch.get_num_threads()))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()


def _peak(sender: Any, name: str, work: str, layers: int, threads: int) -> None:
    torch.set_num_threads(threads)
    model, rows = make(work, layers)
    _touch_weights_and_gradients(model)
    RIVALS[name](model, rows[:2]).step()  # libraries map their code when it first runs
    model.zero_grad(set_to_none=False)
    rival = RIVALS[name](model, rows)
    gc.collect()
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    rival.step()
    sender.send(max(_status_bytes("VmHWM") - before, 0))
    sender.close()


def measure(work: str, repeats: int, layers: int, dry_run: bool) -> None:
    """Time all rivals on a work, and append a row for each."""
    if not dry_run and result_rows.has("rivals", work=work):
        return print(f"{work}: has its rows at this commit")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    result_rows.keep_memory()
    model, rows = make(work, layers)
    counts = sizes(model, rows)
    rivals: dict[str, Rival] = {}
    for name, kind in RIVALS.items():
        if kind is EachRow and counts["rows"] == counts["merged_rows"]:
            continue  # the same as "rows"
        try:
            rivals[name] = kind(model, rows)
        except NotImplementedError as error:
            print(f"{work}: {name}: {error}")
    exact, errors = reference_gradients(*make(work, layers)), {}
    for name, rival in rivals.items():  # the round that warms up
        model.zero_grad(set_to_none=False)
        rival.step()
        errors[name] = float((gradients(model) - exact).norm() / exact.norm())
    seconds = take_turns(rivals, repeats)
    for name in rivals:
        row = {
            "work": work,
            "rival": name,
            **counts,
            **speed(seconds["rows"], seconds[name]),
            "peak_mb": peak_bytes(name, work, layers) >> 20,
            "gradient_error": f"{errors[name]:.1e}",
        }
        result_rows.report("rivals", row, dry_run=dry_run)


def compare(
    model: nn.Module, rows: Sequence[tt.Trajectory], ways: Mapping[str, Rival], repeats: int
) -> dict[str, dict[str, Any]]:
    """Columns of every way: against the fastest run without a tree, and against every row by itself.

    Rows that another row extends or repeats are merged into it, and the others packed, or padded if that is faster in
    the round that warms up. Every row by itself is packed. All take turns.
    """
    counts = sizes(model, rows)
    linear: dict[str, Rival] = {"packed": MergedRows(model, rows), "padded": PaddedRows(model, rows)}
    apart: dict[str, Rival] = {"each row": EachRow(model, rows)} if counts["rows"] > counts["merged_rows"] else {}
    warm = take_turns(linear | dict(ways), 1)
    baseline = min(linear, key=lambda name: warm[name][0])
    seconds = take_turns({baseline: linear[baseline]} | apart | dict(ways), repeats)
    found = {}
    for name in ways:
        each_row = speed(seconds.get("each row", seconds[baseline]), seconds[name])
        against = speed(seconds[baseline], seconds[name])
        found[name] = {
            **counts,
            "baseline": baseline,
            "linear_seconds": f"{statistics.median(seconds[baseline]):.3f}",
            **against,
            "efficiency": f"{float(against['speedup']) / float(counts['ideal']):.3f}",
            "each_row_speedup": each_row["speedup"],
        }
    return found


def take_turns(rivals: Mapping[str, Rival], rounds: int) -> dict[str, list[float]]:
    """The seconds of every round, by name."""
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, rival in rivals.items():
            rival.model.zero_grad(set_to_none=False)
            start = time.perf_counter()
            rival.step()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def speed(base: Sequence[float], seconds: Sequence[float]) -> dict[str, Any]:
    """Columns of a time: the median, the least and the greatest of its rounds, and of `base` over it."""
    ratios = [a / b for a, b in zip(base, seconds)]
    return {
        "rounds": len(seconds),
        "seconds": f"{statistics.median(seconds):.3f}",
        "seconds_min": f"{min(seconds):.3f}",
        "seconds_max": f"{max(seconds):.3f}",
        "speedup": f"{statistics.median(ratios):.3f}",
        "speedup_min": f"{min(ratios):.3f}",
        "speedup_max": f"{max(ratios):.3f}",
    }


def sizes(model: nn.Module, rows: Sequence[tt.Trajectory]) -> dict[str, Any]:
    """Columns of a work: rows and tokens, and the speed-ups over merged rows and over each row that FLOPs allow."""
    tree = tt.build_tree(rows)
    merged, counts = tt.build_tree(cheapest_rows(tree)), tt.TreeEngine(model).cost.counts
    apart = [counts.flops(*linear_work(one, counts.attention_ranges)) for one in (merged, tree)]
    ideals = [flops / counts.flops(*tree_work(tree, counts.attention_ranges)) for flops in apart]
    return {
        "rows": len(rows),
        "merged_rows": len(merged.trajectories),
        "flat_tokens": tree.num_flat_tokens,
        "merged_tokens": merged.num_flat_tokens,
        "unique_tokens": tree.num_tokens,
        "ideal": f"{ideals[0]:.3f}",
        "each_row_ideal": f"{ideals[1]:.3f}",
    }


if __name__ == "__main__":
    numbers = {"repeats": result_rows.count(5), "layers": result_rows.count(14)}
    result_rows.run_each(WORKLOADS, measure, __doc__, **numbers, dry_run=result_rows.DRY_RUN)
