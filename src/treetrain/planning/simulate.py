"""What a training step over many ranks would take: balance, time and memory, from a batch, a model shape and a device.

No process is started. The formulas are in docs/distributed.md; letters there: P parameters, n ranks, w bytes of a
weight in float32 (8 in float64), b bytes of the arithmetic.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from treetrain.planning.budget import Bytes
from treetrain.planning.cost import ModelShape
from treetrain.planning.devices import Device
from treetrain.planning.lockstep import Slot, Timed, in_lockstep, passes_of, timed
from treetrain.planning.make import make_plan, over_ranks
from treetrain.planning.price import CostModel, Floats
from treetrain.planning.ranked import RankedPlan
from treetrain.planning.rates import Rates
from treetrain.tree.token_tree import TokenTree

Parallel = Literal["fsdp", "ddp"]
Sync = Literal["part", "step"]
OPTIMISER_BYTES = 28
"""AdamW in float32, per parameter: weight, gradient and two moments read, weight and moments written."""


class State(NamedTuple):
    """Bytes on every rank besides what a plan needs."""

    model: float
    """Weights, gradients and two moments."""
    gathered: float
    """FSDP: what is whole for a while: two layers' weights, the embedding and head, unsharded gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """The prediction for one number of ranks. Seconds of one step."""

    ranks: int
    idle_ranks: int
    """Ranks without anything to compute; under FSDP they take part in every collective."""
    parallel: Parallel
    imbalance: float
    """Slowest over mean of the ranks' own work."""
    duplicated: float
    """Tokens computed more than once, each copy but the first, over the tokens of one process."""
    tokens: list[int]
    """Tokens that each rank computes."""
    slowest_rank_seconds: float
    """Its own work."""
    waiting_seconds: float
    """FSDP: what the passes' common order adds to that."""
    communication_seconds: float
    """What collectives add to that: all under DDP, what is not hidden behind arithmetic under FSDP."""
    optimiser_seconds: float
    step_seconds: float
    """The sum of these four."""
    passes: int
    """Calls of the model on every rank; under DDP on the rank with most."""
    collective_bytes: float
    """Bytes that every rank sends."""
    speedup: float
    """One rank's predicted step over this one."""
    state_bytes: float
    """Weights, gradients and moments on a rank."""
    peak_bytes: float
    """Of the fullest rank, state included."""
    fits: bool
    """Whether that is within the device's memory."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


def simulate(
    tree: TokenTree,
    shape: ModelShape,
    ranks: int,
    device: Device,
    *,
    cost: CostModel | None = None,
    measured: CostModel | None = None,
    budget: Any = None,
    parallel: Parallel = "fsdp",
    sync: Sync = "part",
    checkpointing: bool = False,
    alone: float | None = None,
) -> Simulation:
    """Predict a step of a batch over ranks.

    Args:
        tree: the batch.
        shape: the model.
        ranks: processes, from 1.
        device: one rank's device, and the links.
        cost: what plans are made with; None: by formula, with the device's speeds.
        measured: how long their passes take; None: as by `cost`. Measured constants predict better than formulas, but
            ranks that share weights plan by formula.
        budget: of every rank, as `make_plan` takes it; None: what the device's memory leaves beside the state.
        parallel: fsdp (weights, gradients and moments in shards) or ddp (whole on every rank).
        sync: fsdp: gradients are reduced after every part, or once per step, which keeps them whole meanwhile.
        checkpointing: every layer is run again in backward.
        alone: predicted seconds of one rank, for `speedup`; None: found here.

    Raises:
        ValueError: no such way to share, a state that leaves no memory, a budget that is too small for some rank.
    """
    if parallel not in ("fsdp", "ddp") or sync not in ("part", "step"):
        raise ValueError(f"parallel={parallel!r}, sync={sync!r}: known are fsdp and ddp, part and step")
    prices = device.cost(shape, checkpointing=checkpointing) if cost is None else cost
    state = state_of(shape, ranks, device, parallel, sync)
    times = prices if measured is None else measured
    plans = _plans(tree, prices, ranks, device, budget, state, aligned=parallel == "fsdp" and ranks > 1)
    rates = Rates.of(times)
    work = [timed(passes_of(plan, rates)) for plan in plans.plans]
    spent = _spent(work, shape, device, parallel, sync)
    if alone is None:
        alone = spent.step_seconds if ranks == 1 else _alone(tree, prices, times, shape, device)
    peak = state.model + state.gathered + max(times.peak_bytes(plan) for plan in plans.plans)
    return Simulation(
        ranks=ranks,
        idle_ranks=plans.dispatch.idle,
        parallel=parallel,
        imbalance=_imbalance([sum(own.seconds) for own in work]),
        duplicated=plans.duplicated,
        tokens=plans.tokens.tolist(),
        **spent._asdict(),
        speedup=alone / spent.step_seconds if spent.step_seconds else 1.0,
        state_bytes=state.model,
        peak_bytes=peak,
        fits=peak <= device.memory_bytes,
    )


def collective_seconds(device: Device, ranks: int, whole_bytes: float, pieces: int = 1) -> float:
    """Of one all-gather, or one reduce-scatter, whose whole is so many bytes; an all-reduce takes two of these.

    Args:
        pieces: collectives that it is made of.

    Every rank receives all but its own share over the links of its node; a node receives what it lacks over its ranks'
    network connections together. The slower of both counts.
    """
    if ranks == 1:
        return 0.0
    inside = whole_bytes * (ranks - 1) / ranks / device.link_bandwidth
    nodes = -(-ranks // device.node_ranks)
    network = device.network_bandwidth or device.link_bandwidth
    between = whole_bytes * (nodes - 1) / nodes / (network * min(device.node_ranks, ranks))
    return pieces * device.collective_seconds + max(inside if device.node_ranks > 1 else 0.0, between)


def state_of(shape: ModelShape, ranks: int, device: Device, parallel: Parallel, sync: Sync) -> State:
    """Bytes on a rank: weights, gradients and AdamW's moments, and what FSDP gathers for a while."""
    wide, narrow = max(4, device.dtype_bytes), device.dtype_bytes
    whole = shape.parameters
    if parallel == "ddp" or ranks == 1:
        return State(4.0 * wide * whole, 0.0)
    layer = shape.layer_weights / shape.layers
    ends = whole - shape.layer_weights
    gathered = narrow * (2 * layer + ends) + wide * (whole if sync == "step" else layer + ends)
    return State(4.0 * wide * whole / ranks, gathered)


class _Spent(NamedTuple):
    """Fields of a Simulation."""

    slowest_rank_seconds: float
    waiting_seconds: float
    communication_seconds: float
    optimiser_seconds: float
    step_seconds: float
    passes: int
    collective_bytes: float


def _plans(
    tree: TokenTree, prices: CostModel, ranks: int, device: Device, budget: Any, state: State, *, aligned: bool
) -> RankedPlan:
    free = int(device.memory_bytes - state.model - state.gathered)
    if budget is None and free <= 0:
        raise ValueError(
            f"{ranks} ranks of {device.name}: weights, gradients and moments take {Bytes(round(sum(state)))} of "
            f"{Bytes(round(device.memory_bytes))} on each; give more ranks or a device with more memory"
        )
    return over_ranks(tree, prices, ranks, budget=budget, free_bytes=free if budget is None else None, aligned=aligned)


def _spent(work: list[Timed], shape: ModelShape, device: Device, parallel: Parallel, sync: Sync) -> _Spent:
    """What the ranks' passes, one list for each, take together."""
    ranks, wide = len(work), max(4, device.dtype_bytes)
    slowest = max(sum(own.seconds) for own in work)
    shards = ranks if parallel == "fsdp" else 1
    optimiser = shape.parameters / shards * OPTIMISER_BYTES / device.memory_bandwidth
    sizes = np.array([device.dtype_bytes, wide]) * float(shape.parameters)
    # FSDP gathers layer by layer, and the embedding with the head; DDP sends a few buckets.
    pieces = shape.layers + 1 if parallel == "fsdp" else 1
    each = np.array([collective_seconds(device, ranks, size, pieces) for size in sizes])
    if parallel == "ddp":
        waiting, passes, needs = 0.0, max(len(own.kinds) for own in work), np.array([[0.0, 2.0]])
        exposed = float((needs @ each).sum())
    else:
        slots = in_lockstep(work)
        hidden = np.array([slot.seconds for slot in slots])
        waiting, passes, needs = float(hidden.sum()) - slowest, len(slots), _collectives(slots, sync)
        times = needs @ each
        if device.kind == "cpu":  # the cores that compute also send
            hidden = np.zeros_like(hidden)
        # A layer's weights are gathered while the one before it computes: only the first has nothing to hide behind.
        exposed = float((np.maximum(times - hidden, 0) + np.minimum(times, hidden) / shape.layers).sum())
    return _Spent(
        slowest_rank_seconds=slowest,
        waiting_seconds=waiting,
        communication_seconds=exposed,
        optimiser_seconds=optimiser,
        step_seconds=slowest + waiting + exposed + optimiser,
        passes=passes,
        collective_bytes=(ranks - 1) / ranks * float((needs @ sizes).sum()),
    )


def _imbalance(seconds: list[float]) -> float:
    """The largest over the mean."""
    mean = sum(seconds) / len(seconds)
    return max(seconds) / mean if mean else 1.0


def _collectives(slots: list[Slot], sync: Sync) -> Floats:
    """float64 [slots, 2]: all-gathers of the weights and reduce-scatters of the gradients of every slot."""
    found = np.zeros((len(slots), 2))
    found[:, 0] = 1
    backward = [number for number, slot in enumerate(slots) if slot.kind == "backward"]
    found[backward if sync == "part" else backward[-1:], 1] = 1
    return found


def _alone(tree: TokenTree, prices: CostModel, times: CostModel, shape: ModelShape, device: Device) -> float:
    """Seconds of one rank with room for everything: nothing recomputed, nothing communicated."""
    return times.seconds(make_plan(tree, prices)) + shape.parameters * OPTIMISER_BYTES / device.memory_bandwidth
