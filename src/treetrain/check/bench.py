"""Measures the speed-up of a tree over the best linear baseline on the user's model and rows, and a device's speed.

Forward and backward are timed; an optimiser step costs both sides the same. The engines take turns in one process, so a
machine that slows down slows all of them, and medians are compared. All baselines run the same fused head.
"""

import contextlib
import dataclasses
import platform
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from treetrain.check.linear_engine import LinearEngine
from treetrain.check.verify import TreeReport
from treetrain.core.engine.engine_model import Call
from treetrain.core.engine.executor import Executor, Part, PassCounts
from treetrain.core.engine.extension import Extension, LossExtension
from treetrain.core.engine.loss_gradients import KnownGradients
from treetrain.core.engine.model_passes import ModelPasses
from treetrain.core.errors import UnsupportedModel
from treetrain.core.head.lm_head import Edges, ScoreRequest, Scores, scoring_head
from treetrain.core.hf.capability import model_device
from treetrain.core.losses.protocol import LossProtocol, as_loss
from treetrain.core.planning.cost import CostModel, ModelCounts
from treetrain.core.planning.make import Bytes
from treetrain.core.planning.plan import Plan, segment_heights
from treetrain.core.tree.layout import PackedLayout, pack
from treetrain.core.tree.token_tree import Row, TokenTree, as_tree, build_tree
from treetrain.engine import TreeEngine
from treetrain.layers.finders import check_model
from treetrain.layers.recurrence.recurrence import Recurrence
from treetrain.losses import sft
from treetrain.models.costs import cost_if_countable, cost_of
from treetrain.models.work import cheapest_rows, linear_work, tree_work

PACK_TOKENS = {"cpu": (4096, 8192), "cuda": (8192, 32_768)}
"""Batch sizes in tokens of the linear runs, by device type; the fastest run is the baseline."""
CALIBRATION_TOKENS, CALIBRATION_PASSES = {"cpu": (64, 256), "cuda": (1024, 4096)}, 5
"""Tokens of the short and the long pass, and the number of timed runs of each."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport(TreeReport):
    """The outcome of `bench`; times are medians in seconds of one forward and backward."""

    tree_seconds: float
    baseline: str
    baselines: dict[str, float]
    speedup: float
    """Seconds of the fastest baseline / seconds of the tree; the median over the rounds."""
    speedup_spread: tuple[float, float]
    """Least and greatest speed-up of a round."""
    linear_rows: int
    """Rows of the baselines: those that no other row extends or repeats, unless a loss was given."""
    ideal: float | None
    """FLOP-ideal speed-up over these rows, less the forwards that any plan within the budget must repeat; None if the
    model's shape is unknown."""
    efficiency: float | None
    """speedup / ideal."""
    seconds: dict[str, list[float]]
    """The time of every measured round, by engine name."""


def bench(
    model: nn.Module,
    trajectories: Sequence[Row] | TokenTree,
    *,
    loss: LossProtocol | Callable[..., object] | None = None,
    temperature: float = 1.0,
    budget: int | str | Bytes | None = None,
    repeats: int = 5,
    baselines: Collection[str] | None = None,
) -> BenchReport:
    """Time the tree against linear baselines.

    Args:
        model: a causal LM; its gradients are overwritten.
        trajectories: one step's rows, as `TreeEngine.forward_backward` takes them.
        loss: any loss of the protocol. None is `losses.sft()`, and the baselines train the rows that no other row
            extends or repeats, with the weights of all (`cheapest_rows`). A loss that is given may need every row.
        budget: the tree engine's budget; see `TreeEngine`.
        repeats: measured rounds; every engine runs once in each. Baselines over 5% slower than the best in a warm-up
            round drop out.
        baselines: names of baselines to run, such as the `BenchReport.baseline` of a smaller run; None runs all.

    Raises:
        UnsupportedModel, DataError: as `TreeEngine.forward_backward`.
        ValueError: fewer than one repeat, or an unknown baseline.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: give at least 1")
    kinds = {"packed": LinearEngine, "padded": PaddedEngine}
    sizes = PACK_TOKENS["cuda" if model_device(model).type == "cuda" else "cpu"]
    known = [f"{kind} {size}" for size in sizes for kind in kinds]
    wanted = known if baselines is None else list(baselines)
    if not wanted or not set(wanted) <= set(known):
        raise ValueError(f"baselines={wanted}: give one or more of {', '.join(known)}")
    rows = list(as_tree(trajectories, merge=True).trajectories)
    tree = build_tree(rows)
    linear = cheapest_rows(tree) if loss is None else rows
    loss = as_loss(sft() if loss is None else loss)
    engines = {"tree": TreeEngine(model, budget=budget, temperature=temperature, check=False)}
    for kind, _, size in (name.partition(" ") for name in wanted):
        engines[f"{kind} {size}"] = kinds[kind](model, pack_tokens=int(size), temperature=temperature)

    attention: dict[str, str] = {}

    def take_turns(names: Sequence[str], rounds: int) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in names:
                model.zero_grad(set_to_none=False)
                _synchronise(model)
                start = time.perf_counter()
                result = engines[name].forward_backward(rows if name == "tree" else linear, loss)
                attention[name] = ", ".join(result.attention) or "none"
                _synchronise(model)
                seconds[name].append(time.perf_counter() - start)
        return seconds

    warm = {name: seconds[0] for name, seconds in take_turns(list(engines), 1).items()}
    best = min(warm[name] for name in wanted)
    close = [name for name in wanted if warm[name] <= 1.05 * best]
    measured = take_turns(["tree", *close], repeats)
    medians = {name: statistics.median(times) for name, times in measured.items()}
    baseline = min(close, key=lambda name: medians[name])
    ratios = [a / b for a, b in zip(measured[baseline], measured["tree"])]
    speedup = statistics.median(ratios)
    plan = engines["tree"].plan(rows)
    cost = cost_if_countable(model)
    ideal = None
    if cost is not None:
        tokens = engines["tree"].budget
        ranges = cost.counts.attention_ranges
        share = budget_share(plan, cost.counts, tokens if isinstance(tokens, int) else plan.peak_tokens)
        apart, ours = linear_work(build_tree(linear), ranges), tree_work(tree, ranges)
        ideal = share * cost.counts.flops(*apart) / cost.counts.flops(*ours)
    return BenchReport(
        trajectories=len(rows),
        flat_tokens=tree.num_flat_tokens,
        unique_tokens=tree.num_tokens,
        attention=attention["tree"],
        parts=plan.num_parts,
        recomputed_tokens=plan.recomputed_tokens,
        tree_seconds=medians["tree"],
        baseline=baseline,
        linear_rows=len(linear),
        baselines={name: medians.get(name, warm[name]) for name in wanted},
        speedup=speedup,
        speedup_spread=(min(ratios), max(ratios)),
        ideal=ideal,
        efficiency=None if ideal is None else speedup / ideal,
        seconds=measured,
    )


def _synchronise(model: nn.Module) -> None:
    if model_device(model).type == "cuda":
        torch.cuda.synchronize()


class PaddedPasses(ModelPasses):
    """Passes over forests of single rows, each forest as one right-padded batch.

    Padding comes after every real token, so causal attention needs no padding mask. Each batch is one stock causal call
    per layer of transformers' own attention, with the same fused head as in all other runs. Recurrent layers run as
    they are too.
    """

    def __init__(self, call: Call, extensions: Sequence[Extension], *others: Any, **options: Any):
        plain = [extension for extension in extensions if not isinstance(extension, Recurrence)]
        super().__init__(call, plain, *others, **options)

    def mode(self, call: Call) -> contextlib.AbstractContextManager[None]:
        """Switch nothing: attention is transformers' own."""
        return contextlib.nullcontext()

    def run(self, part: Part, request: ScoreRequest, *, score: bool = True, idle: bool = False) -> Scores:
        """See `ModelPasses.run`."""
        if any(isinstance(extension, LossExtension) for extension in self._extensions):
            raise UnsupportedModel(
                "padded batches have neither an auxiliary loss of routers, which would count the padding, nor recorded "
                "experts: set config.output_router_logits=False and leave `experts` out to compare with them"
            )
        layout, device = part.piece.layout, self.device
        row = np.cumsum(layout.positions == 0) - 1
        width = int(layout.positions.max(initial=0)) + 1
        slot = row * width + layout.positions
        ids = np.zeros((int(row[-1]) + 1 if len(row) else 0) * width, dtype=np.int64)
        ids[slot] = layout.input_ids
        edges = Edges(
            rows=torch.from_numpy(slot[layout.rows]).to(device),
            edge_row=torch.from_numpy(layout.edge_row_index).to(device),
            targets=torch.from_numpy(layout.edge_targets).to(device),
        )
        call = self._call
        with scoring_head(call.capabilities, edges, request) as calls:
            call.model(
                input_ids=torch.from_numpy(ids.reshape(-1, width)).to(device), attention_mask=None, use_cache=False
            )
        return calls[0].scores


class PaddedEngine(LinearEngine):
    """A `LinearEngine` that pads: batches of at most ``pack_tokens`` slots (a longer row runs by itself)."""

    passes_type = PaddedPasses

    def plan_of(self, call: Call, layout: PackedLayout) -> Plan:
        """Fill batches with rows in order of length."""
        lengths = np.diff(np.append(np.flatnonzero(layout.parent < 0), layout.num_tokens))
        slots = self.pack_tokens or (int(lengths.sum()) + 1) ** 2
        batch_of = np.zeros(len(lengths), np.int64)
        batch = rows = 0
        for row in np.argsort(lengths, kind="stable").tolist():
            if rows and (rows + 1) * int(lengths[row]) > slots:
                batch, rows = batch + 1, 0
            batch_of[row] = batch
            rows += 1
        return Plan.of_parts(layout, np.repeat(batch_of, lengths))


# ---- Calibration


def measured_cost(model: nn.Module) -> CostModel:
    """Measure the cost model of a model on its device. Gradients of the model are dropped.

    Two passes are enough: `models/costs.py` counts the work of a pass, and the device's description gives the relative
    speed of each kind of product. Two unknowns remain, the overall speed and the fixed cost of a pass:

        seconds                    long pass: FLOPs and fixed cost
           |                    .
           |                .        slope: measured over described seconds per FLOP
           |            .
           |        .  short pass
           |    .
           |.......................  intercept: the fixed cost of a pass
           +------------------------> seconds predicted from the description

    Raises:
        UnsupportedModel: a model that is not exact on a tree or cannot be counted.
    """
    cost = cost_of(model)
    capabilities = check_model(model)
    device = model_device(model)
    short, long = (min(n, capabilities.max_positions or n) for n in CALIBRATION_TOKENS[device.type])
    plans = [_chain(n, capabilities.vocab_size) for n in (min(short, long // 2), long)]
    times = [_pass_seconds(model, plan) for plan in plans]
    model.zero_grad(set_to_none=True)
    predicted = [cost.seconds(plan) - cost.speeds.graph_pass for plan in plans]
    # Noise must not make a device look more than five times as fast as the long pass alone shows.
    slope = max((times[1] - times[0]) / (predicted[1] - predicted[0]), 0.2 * times[1] / predicted[1])
    fixed = max(times[0] - slope * predicted[0], 0.0)
    speeds, tokens = cost.speeds, " and ".join(str(plan.layout.num_tokens) for plan in plans)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    measured = dataclasses.replace(
        speeds,
        layers=speeds.layers / slope,
        attention=speeds.attention / slope,
        head=speeds.head / slope,
        graph_pass=fixed,
        forward_pass=fixed * speeds.forward_pass / speeds.graph_pass,
        source=f"measured on {name} with passes of {tokens} tokens",
    )
    return dataclasses.replace(cost, speeds=measured)


def _chain(tokens: int, vocabulary: int) -> Plan:
    """Plan a row of random tokens as one part; all but the first are predicted."""
    ids = np.random.default_rng(0).integers(0, vocabulary, tokens + 1)
    layout = pack(build_tree([ids.astype(np.int32)]), np.arange(tokens + 1) > 0)
    return Plan.of_parts(layout, np.zeros(layout.num_tokens, np.int64))


def _pass_seconds(model: nn.Module, plan: Plan) -> float:
    """Measure the least time of a forward and backward of a plan: other load only adds time."""
    times, engine = [], TreeEngine(model, check=False)
    call = engine.prepared.call()
    extensions = call.extensions(build_tree([]), balanced=False)
    with engine.ranks.together("measured_cost"):  # the passes of a sharded model are collective
        for _ in range(CALIBRATION_PASSES + 1):
            _synchronise(model)
            start = time.perf_counter()
            table = call.table(plan.layout, entropy=False)
            gradients = KnownGradients(table, torch.ones_like(table.logprobs))
            passes = ModelPasses(call, extensions, PassCounts(), table, gradients)
            Executor(plan, passes, gradients=True).train()
            _synchronise(model)
            times.append(time.perf_counter() - start)
    return min(times[1:])  # kernels are compiled in the first


def heights(layout: PackedLayout) -> np.ndarray:
    """Tokens on the longest path from each token down, itself included."""
    start, length = layout.segment_start[:-1], np.diff(layout.segment_start)
    return np.repeat(segment_heights(layout) + start, length) - np.arange(len(layout.parent))


def budget_share(plan: Plan, counts: ModelCounts, budget: int) -> float:
    """Divide the FLOPs of a step without recomputation by the least that a budget in tokens allows; at most 1."""
    layout = plan.layout
    again = layout.positions[heights(layout) > budget]
    once = counts.flops(layout.num_tokens, counts.pairs_at(layout.positions), len(layout.rows))
    return once / (once + counts.flops(len(again), counts.pairs_at(again), 0) / 3) if once else 1.0
