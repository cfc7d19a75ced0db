"""Predict a training step over many ranks: balance, time and memory, from a batch, a model shape and a device.

No process is started. docs/distributed.md has the formulas, with P parameters, n ranks, w bytes per weight (4, or 8 in
float64) and b bytes per number in the compute dtype.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from treetrain.planning.budget import Bytes
from treetrain.planning.collective_order import passes_of, timed_order
from treetrain.planning.cost import ModelCounts, ModelShape
from treetrain.planning.devices import Device
from treetrain.planning.make import make_plan, plan_ranks
from treetrain.planning.price import CostModel
from treetrain.tree.token_tree import TokenTree

Parallel = Literal["fsdp", "ddp"]
Sync = Literal["part", "step"]
OPTIMISER_BYTES = 28
"""Bytes that float32 AdamW moves per parameter: reads weight, gradient and two moments, writes weight and moments."""


class State(NamedTuple):
    """Bytes on every rank in addition to those of a plan."""

    model: float
    """Weights, gradients and two moments."""
    gathered: float
    """FSDP: temporarily unsharded parameters: weights of two layers, embedding and head, and unsharded gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """The prediction of one step for one number of ranks."""

    ranks: int
    idle_ranks: int
    """Ranks with nothing to compute; under FSDP they still take part in every collective."""
    parallel: Parallel
    imbalance: float
    """Slowest rank's own work over the mean."""
    duplicated: float
    """Redundant copies of tokens, relative to the tokens that one process computes."""
    tokens: list[int]
    """Tokens that each rank computes."""
    slowest_rank_seconds: float
    """The slowest rank's own work."""
    waiting_seconds: float
    """FSDP: added by the common order of passes."""
    communication_seconds: float
    """Added by collectives: all of them under DDP; under FSDP those not overlapped with computation."""
    optimiser_seconds: float
    step_seconds: float
    """The sum of these four."""
    passes: int
    """Calls of the model on every rank; under DDP, on the rank with the most."""
    collective_bytes: float
    """Bytes that every rank sends."""
    speedup: float
    """Predicted step on one rank over this step."""
    state_bytes: float
    """Weights, gradients and moments on a rank."""
    peak_bytes: float
    """Peak of the fullest rank, state included."""
    fits: bool
    """True if that is within the device's memory."""


def simulate(
    tree: TokenTree,
    shape: ModelCounts | ModelShape,
    ranks: int,
    device: Device,
    *,
    cost: CostModel | None = None,
    measured: CostModel | None = None,
    budget: Any = None,
    parallel: Parallel = "fsdp",
    sync: Sync = "part",
    checkpointing: bool = False,
) -> Simulation:
    """Predict the step of a batch over ranks.

    Args:
        tree: the batch.
        shape: the model's counts in the device's dtype, or its shape.
        ranks: processes, from 1.
        device: one rank's device, and the links.
        cost: the cost model that plans are made with; None: by formula, with the device's speeds.
        measured: the cost model that predicts the time of their passes; None: `cost`. Measured constants predict better
            than formulas, but ranks that share weights plan by formula.
        budget: the budget of every rank, as in `make_plan`; None: the device's memory minus the state.
        parallel: fsdp (weights, gradients and moments in shards) or ddp (whole on every rank).
        sync: for fsdp: reduce gradients after every part, or once per step, which keeps them unsharded until then.
        checkpointing: every layer runs forward again in backward.

    Raises:
        ValueError: an unknown `parallel` or `sync`, a state that leaves no memory, a budget too small for some rank.
    """
    if parallel not in ("fsdp", "ddp") or sync not in ("part", "step"):
        raise ValueError(f"parallel={parallel!r}, sync={sync!r}: known are fsdp and ddp, part and step")
    if isinstance(shape, ModelShape):
        counts = shape.counts(dtype_bytes=device.dtype_bytes, checkpointing=checkpointing)
    else:
        counts = shape.checkpointed(checkpointing)
    prices = CostModel.on(device, counts) if cost is None else cost
    times = prices if measured is None else measured
    state = state_of(counts, ranks, device, parallel, sync)
    free = int(device.memory_bytes - sum(state))
    if budget is None and free <= 0:
        raise ValueError(
            f"{ranks} ranks of {device.name}: weights, gradients and moments take {Bytes(round(sum(state)))} of "
            f"{Bytes(round(device.memory_bytes))} on each; give more ranks or a device with more memory"
        )
    free_bytes, aligned = free if budget is None else None, parallel == "fsdp" and ranks > 1
    dispatch, plans = plan_ranks(tree, prices, ranks, budget=budget, free_bytes=free_bytes, aligned=aligned)
    work = [passes_of(plan, times) for plan in plans]
    seconds = np.array([sum(own.seconds) for own in work])
    slowest = float(seconds.max())
    # Bytes of all weights, and of all gradients; FSDP sends them layer by layer, DDP in a few buckets.
    sizes = np.array([device.dtype_bytes, max(4, device.dtype_bytes)]) * float(counts.parameters)
    pieces = counts.layers + 1 if parallel == "fsdp" else 1
    each = np.array([collective_seconds(device, ranks, size, pieces) for size in sizes])
    if parallel == "ddp":
        needs = np.array([[0.0, 2.0]])  # an all-reduce of the gradients
        waiting, passes, exposed = 0.0, max(len(own.kinds) for own in work), float((needs @ each).sum())
    else:
        order = timed_order(work)
        hidden = np.array([spent for _, spent in order])
        waiting, passes = float(hidden.sum()) - slowest, len(order)
        # Every pass gathers the weights; every backward, or the last one alone, reduces the gradients.
        backward = [number for number, (turn, _) in enumerate(order) if turn.kind == "backward"]
        needs = np.zeros((passes, 2))
        needs[:, 0] = 1
        needs[backward if sync == "part" else backward[-1:], 1] = 1
        sent = needs @ each
        if device.kind == "cpu":  # the cores that compute also send, so nothing overlaps
            hidden = np.zeros_like(hidden)
        # A layer's weights are gathered while the layer before it computes; only the first layer's cannot overlap.
        exposed = float((np.maximum(sent - hidden, 0) + np.minimum(sent, hidden) / counts.layers).sum())
    whole_optimiser = counts.parameters * OPTIMISER_BYTES / device.memory_bandwidth
    optimiser = whole_optimiser / (ranks if parallel == "fsdp" else 1)
    step = slowest + waiting + exposed + optimiser
    # One rank with room for everything: nothing is recomputed, nothing is sent.
    alone = step if ranks == 1 else times.seconds(make_plan(tree, prices)) + whole_optimiser
    peak = sum(state) + max(times.peak_bytes(plan) for plan in plans)
    tokens, unique, mean = [plan.layout.num_tokens for plan in plans], dispatch.unique, float(seconds.mean())
    return Simulation(
        ranks=ranks,
        idle_ranks=int((dispatch.tokens == 0).sum()),
        parallel=parallel,
        imbalance=slowest / mean if mean else 1.0,
        duplicated=sum(tokens) / unique - 1 if unique else 0.0,
        tokens=tokens,
        slowest_rank_seconds=slowest,
        waiting_seconds=waiting,
        communication_seconds=exposed,
        optimiser_seconds=optimiser,
        step_seconds=step,
        passes=passes,
        collective_bytes=(ranks - 1) / ranks * float((needs @ sizes).sum()),
        speedup=alone / step if step else 1.0,
        state_bytes=state.model,
        peak_bytes=peak,
        fits=peak <= device.memory_bytes,
    )


def collective_seconds(device: Device, ranks: int, whole_bytes: float, pieces: int = 1) -> float:
    """Seconds of one all-gather or reduce-scatter of `whole_bytes`; an all-reduce takes twice as long.

    Every rank receives all shards but its own over the links of its node. A node receives the shards of other nodes
    over its ranks' network connections together. The slower of the two counts.

    Args:
        pieces: the number of collectives that the bytes are split into.
    """
    if ranks == 1:
        return 0.0
    inside = whole_bytes * (ranks - 1) / ranks / device.link_bandwidth
    nodes = -(-ranks // device.node_ranks)
    network = device.network_bandwidth or device.link_bandwidth
    between = whole_bytes * (nodes - 1) / nodes / (network * min(device.node_ranks, ranks))
    return pieces * device.collective_seconds + max(inside if device.node_ranks > 1 else 0.0, between)


def state_of(counts: ModelCounts, ranks: int, device: Device, parallel: Parallel, sync: Sync) -> State:
    """Bytes on a rank: weights, gradients and AdamW's moments, and FSDP's temporarily gathered parameters."""
    wide, narrow = max(4, device.dtype_bytes), device.dtype_bytes
    whole = counts.parameters
    if parallel == "ddp" or ranks == 1:
        return State(4.0 * wide * whole, 0.0)
    layer = counts.parameters_in_layers / counts.layers
    ends = whole - counts.parameters_in_layers
    gathered = narrow * (2 * layer + ends) + wide * (whole if sync == "step" else layer + ends)
    return State(4.0 * wide * whole / ranks, gathered)
