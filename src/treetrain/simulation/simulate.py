"""Predict a training step over many ranks, and find the fastest way to split a model and a batch over them.

No process is started. N ranks are divided in four ways; a `Split` is one combination of sizes:

    tensor   ranks hold 1/t of the weights each, and the same tokens
    context  ranks hold 1/c of the tokens of every part
    data     groups of c x t ranks hold different rows; FSDP2 shards the weights over all ranks, over the ranks of a
             node (with a copy in every node), or not at all
    expert   experts are divided over e of these ranks; tokens travel to their experts

A group of c x t ranks is one rank to the planner. A token costs each of them a share of the arithmetic and of the
memory, plus the links' time. So a step's time is predicted as for one rank (``core/planning/cost.py``), with three
differences:

1. Collectives within a layer (all-to-all of heads or of experts' tokens, all-reduce of tensor parallel) are on the
   critical path: they add seconds per token and per pass.
2. FSDP2 gathers the weights in every pass and reduces the gradients in a backward. A GPU overlaps this with the
   arithmetic, except for the first layer (`WeightLinks`). All ranks run every pass together, so each waits for the
   slowest (``parallel/collective_order.py``).
3. Whole copies of weights, or of shards, all-reduce their gradients.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from treetrain.core.planning.cost import CostModel, ModelCounts, Speeds
from treetrain.core.planning.devices import MEMORY_MARGIN, USABLE, Device
from treetrain.core.planning.make import Bytes, parse_budget
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.token_tree import TokenTree
from treetrain.parallel.balance import Balancer
from treetrain.parallel.collective_order import timed_order
from treetrain.parallel.links import Collective, Sharding, WeightCollectives, sharded_links
from treetrain.simulation.rank_plans import plan_ranks
from treetrain.simulation.splits import Split

OPTIMISER_BYTES = 28
"""Bytes that float32 AdamW moves per parameter: reads weight, gradient and two moments, writes weight and moments."""
TENSOR_FORWARD, TENSOR_BACKWARD, TENSOR_BACKWARD_EXPERTS = 2, 5, 4
"""All-reduces of hidden states per layer in transformers' tensor parallel. Forward: the outputs of attention and MLP.
Backward: the gradients of the inputs of query, key, value, gate and up projection; one for all experts."""


class Refused(NamedTuple):
    """A split that does not fit into the memory."""

    split: Split
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """The predicted step of one split."""

    split: Split
    idle_ranks: int
    """Ranks whose group has nothing to compute; under FSDP they still take part in every collective."""
    imbalance: float
    """The slowest group's work divided by the mean over groups."""
    tokens: list[int]
    """Tokens that each data-parallel group computes."""
    parts: int
    """Number of parts, in the group with the most."""
    passes: int
    """Calls of the model on every rank; without FSDP, on the rank with the most."""
    work_seconds: float
    """The slowest group's arithmetic."""
    waiting_seconds: float
    """Seconds that the common order of passes adds under FSDP2."""
    link_seconds: dict[str, float]
    """Seconds that links within layers, and links of weights and gradients, add to the arithmetic."""
    optimiser_seconds: float
    sent_bytes: dict[str, float]
    """Bytes that a rank of the group with the most tokens sends, by purpose: context, tensor, experts, weights,
    gradients."""
    memory: dict[str, float]
    """Bytes on the fullest rank, by purpose: weights, gradients, optimiser, gathered (layers that FSDP2 makes whole for
    a time), activations and KV cache."""

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of the step."""
        return self.work_seconds + self.waiting_seconds + sum(self.link_seconds.values()) + self.optimiser_seconds

    @property
    def link_share(self) -> float:
        """The share of the step that links take."""
        return sum(self.link_seconds.values()) / self.step_seconds if self.step_seconds else 0.0

    @property
    def peak_bytes(self) -> float:
        """Bytes on the fullest rank."""
        return sum(self.memory.values())


# ---- the cost of a split


def share_of(counts: ModelCounts, split: Split) -> ModelCounts:
    """Count one rank, per token of its group. The router is assumed to choose all experts equally often."""
    t, tokens = split.tensor, split.context
    b = counts.dtype_bytes
    wide = counts.wide_bytes
    hidden = counts.hidden
    experts = counts.expert_parameters // split.expert_division
    layers = (counts.parameters_in_layers - counts.expert_parameters) // t + experts
    # Norms and the residual stream are whole on every tensor rank: two norms in each layer.
    whole = min(2 * (2 * hidden * b + (hidden + 1) * wide), counts.saved_layer) if t > 1 else 0.0
    saved = counts.layers * whole

    def divided(value: float, kept: float = 0.0) -> float:
        return (kept + (value - kept) / t) / tokens

    return replace(
        counts,
        hidden=hidden // tokens,
        vocab=-(-counts.vocab // t),
        parameters=layers + (counts.parameters - counts.parameters_in_layers) // t,
        parameters_in_layers=layers,
        expert_parameters=experts,
        token_flops=divided(counts.token_flops),
        flops_by_range={each: divided(flops) for each, flops in counts.flops_by_range.items()},
        saved_layers=divided(counts.saved_layers, min(saved, counts.saved_layers)),
        saved_layer=divided(counts.saved_layer, whole),
        saved_outside=counts.saved_outside / tokens,
        saved_pass=counts.saved_pass / t,
        backward_token=counts.backward_token / tokens,
        weight_gradient=counts.weight_gradient / split.expert_division,
        forward_token=divided(counts.forward_token),
        cache_token=divided(counts.cache_token),
        cache_layer=divided(counts.cache_layer),
        head_pass=counts.head_pass / t,
        step=counts.step / t,
    )


class Links(NamedTuple):
    """The collectives of a rank."""

    forward: dict[str, Collective]
    """Within layers: context, tensor, experts. Bytes are per token of the group, calls per pass."""
    backward: dict[str, Collective]
    """The same collectives in a backward."""
    weights: WeightCollectives


def links_of(own: ModelCounts, split: Split, device: Device) -> Links:
    """List the collectives of a rank with these counts (`share_of`)."""
    b = own.dtype_bytes
    wide = own.wide_bytes
    layers = own.layers
    # Numbers per token in all layers. A visible pair takes 4 FLOPs for each number of a query: two products. The KV
    # cache holds a number of keys or values in the compute dtype, and its gradient in float32.
    queries, cached = sum(own.flops_by_range.values()) / 4, own.cache_token / (b + wide)
    hidden_bytes = own.hidden * b
    # Every tensor rank sends its share of a token's hidden state to each chosen expert, and gets as much back.
    expert_bytes = 2 * layers * own.experts_per_token * hidden_bytes / split.tensor

    def within_layers(all_reduces: int) -> dict[str, Collective]:
        return {
            # Before attention queries, keys and values go from tokens to heads; after it outputs, as wide as queries,
            # go back.
            "context": Collective(
                "all-to-all", device.group(split.context, split.tensor), (2 * queries + cached) * b, 2 * layers
            ),
            "tensor": Collective("all-reduce", device.group(split.tensor), hidden_bytes * all_reduces, all_reduces),
            "experts": Collective("all-to-all", device.group(split.expert), expert_bytes, 2 * layers),
        }

    forward = within_layers(TENSOR_FORWARD * layers + 1)  # one for the embedding
    backward = within_layers(layers * (TENSOR_BACKWARD_EXPERTS if own.experts else TENSOR_BACKWARD))
    if own.checkpointing:  # backward runs the forward's collectives again
        for name, each in forward.items():
            again = backward[name]
            backward[name] = each._replace(
                whole_bytes=each.whole_bytes + again.whole_bytes, calls=each.calls + again.calls
            )
    expert_shards, stride = split.expert_shards, split.expert_division
    weights = WeightCollectives.of(
        own,
        Sharding(
            device.group(split.shards, split.tensor),
            device.group(split.copies, split.tensor * split.shards),
        ),
        Sharding(
            device.group(expert_shards, stride),
            device.group(split.ranks // (expert_shards * stride), stride * expert_shards),
        ),
    )
    return Links(forward, backward, weights)


def _seconds(collectives: Iterable[Collective], device: Device) -> float:
    return sum(each.seconds(device) for each in collectives)


def cost_of_split(
    counts: ModelCounts, split: Split, device: Device, speeds: Speeds | None = None
) -> tuple[CostModel, CostModel, Links]:
    """Make the cost model of a group of ranks without links and with them; also return the links.

    Args:
        speeds: measured speeds of a rank; None takes the speeds in the device's description.
    """
    own = share_of(counts, split)
    alone = CostModel(counts=own, speeds=speeds or Speeds.on(device, own), device=device.kind)
    links, speeds = links_of(own, split, device), alone.speeds
    # Collectives within layers add seconds to every token and to every pass.
    (pass_forward, token_forward), (pass_backward, token_backward) = (
        (_seconds((each._replace(whole_bytes=0.0) for each in collectives), device), _seconds(collectives, device))
        for collectives in (links.forward.values(), links.backward.values())
    )
    both = (1 + speeds.backward_ratio) * own.token_flops
    added = token_forward - pass_forward + token_backward - pass_backward
    speeds = replace(
        speeds,
        layers=both / (both / speeds.layers + added),
        graph_pass=speeds.graph_pass + pass_forward + pass_backward,
        forward_pass=speeds.forward_pass + pass_forward,
    )
    return alone, replace(alone, speeds=speeds, links=links.weights.links(device, own.layers)), links


def state_bytes(own: ModelCounts, split: Split) -> dict[str, float]:
    """Count the bytes that a rank with these counts (`share_of`) holds beside a plan's.

    FSDP2 gathers a layer while the one before runs, so two layers are whole at a time. Embedding and head are whole
    too, and so are the gradients of one layer, embedding and head until they are reduced.
    """
    wide = own.wide_bytes
    b = own.dtype_bytes
    expert = own.expert_parameters
    stored = wide * ((own.parameters - expert) / split.shards + expert / split.expert_shards)
    layer, ends = own.parameters_in_layers / own.layers, own.parameters - own.parameters_in_layers
    gathered = b * (2 * layer + ends) + wide * (layer + ends) if split.shards > 1 else 0.0
    return {"weights": stored, "gradients": stored, "optimiser": 2 * stored, "gathered": gathered}


# ---- the step


def simulate(
    tree: TokenTree,
    counts: ModelCounts,
    splits: Sequence[Split],
    device: Device,
    *,
    budget: int | str | Bytes | None = None,
    speeds: Speeds | None = None,
    planned_for: Device | None = None,
) -> list[Simulation | Refused]:
    """Predict the step of a batch for each split, in the order given.

    Args:
        counts: the model's counts in the device's dtype.
        budget: the budget of every rank, as in `make_plan`; None takes the device's memory minus the state.
        speeds: measured speeds of a rank; None takes the speeds in the device's description.
        planned_for: the device that the engine makes its plans for; None makes them for `device` and the split's links.
    """
    budget = parse_budget(budget)
    usable = USABLE[device.kind] * device.memory_bytes
    balancer = Balancer(tree, CostModel.on(planned_for or device, counts))

    def predicted(split: Split) -> Simulation | Refused:
        alone, cost, links = cost_of_split(counts, split, device, speeds)
        own = alone.counts
        held = state_bytes(own, split)
        free = int(usable - sum(held.values()))
        if budget is None and free <= 0:
            needed = f"weights, gradients and optimiser state need {_gb(sum(held.values()))}"
            return Refused(split, f"{needed} of {_gb(usable)} usable on each rank")
        plans_cost = cost
        if planned_for is not None:  # the engine plans by published speeds, whatever the device turns out to do
            shards = sharded_links(planned_for, counts, shards=split.shards, copies=split.copies)
            plans_cost = CostModel.on(planned_for, counts, shards)
        aligned = split.shards > 1 or split.expert > 1
        try:
            dispatch, plans = plan_ranks(
                tree,
                plans_cost,
                split.data,
                budget=budget * split.context if isinstance(budget, int) else budget,
                free_bytes=free if budget is None else None,
                aligned=aligned,
                balancer=balancer,
            )
        except ValueError as error:
            return Refused(split, f"{error}")
        room = budget.count if isinstance(budget, Bytes) else free
        memory, reduces_last = _peak_memory(plans, cost, split, held, own.wide_bytes * own.parameters, room)

        work = [alone.passes(plan) for plan in plans]
        seconds = np.array([sum(passes.seconds) for passes in work])
        slowest = int(seconds.argmax())
        # Ranks that run every pass together wait in each for the slowest. Others meet once, at the end of the step.
        together = range(len(plans)) if aligned else [slowest]
        times = _times([plans[rank] for rank in together], alone, cost, links, device, reduces_last=reduces_last)
        parameters = held["weights"] / own.wide_bytes
        tokens = [plan.layout.num_tokens for plan in plans]
        mean = float(seconds.mean())
        return Simulation(
            split=split,
            idle_ranks=int((dispatch.tokens == 0).sum()) * split.tensor * split.context,
            imbalance=float(seconds.max()) / mean if mean else 1.0,
            tokens=tokens,
            parts=max(plan.num_parts for plan in plans),
            passes=max(len(times.kinds), *(len(passes.kinds) for passes in work)),
            work_seconds=float(seconds.max()),
            waiting_seconds=times.alone - float(seconds.max()),
            link_seconds={"within layers": times.busy - times.alone, "weights and gradients": times.outside},
            optimiser_seconds=parameters * OPTIMISER_BYTES / device.memory_bandwidth,
            sent_bytes=_sent(links, plans[int(np.argmax(tokens))], times.kinds, reduces_last),
            memory=memory,
        )

    return [predicted(split) for split in splits]


def _peak_memory(
    plans: list[Plan], cost: CostModel, split: Split, held: dict[str, float], whole: float, room: float
) -> tuple[dict[str, float], bool]:
    """The bytes of the rank that needs most, by purpose, and whether gradients are reduced once, in the last backward.

    Args:
        held: bytes beside the plan's, as `state_bytes`.
        whole: bytes of the gradients of all parameters.
        room: bytes that a plan may use.
    """
    of_plan = max((cost.bytes_by(plan) for plan in plans), key=lambda by: sum(by.values()))
    cache = of_plan["KV cache"]
    memory = held | {"activations": sum(of_plan.values()) - cache, "KV cache": cache}
    # Reducing once saves links, and holds whole gradients until then: done if they fit beside the plan.
    reduces_last = MEMORY_MARGIN * (sum(of_plan.values()) + whole) <= room
    if reduces_last and split.shards > 1:
        memory["gathered"] += whole
    return memory, reduces_last


class _Times(NamedTuple):
    """Seconds of a step of ranks that run their passes together."""

    kinds: str
    """The passes in their common order, a letter each."""
    alone: float
    """Without links."""
    busy: float
    """With links within layers."""
    outside: float
    """Seconds that links add for weights and gradients, beside the passes."""


def _times(
    plans: list[Plan], alone: CostModel, cost: CostModel, links: Links, device: Device, *, reduces_last: bool
) -> _Times:
    order = timed_order([alone.passes(plan) for plan in plans])
    without_shards = replace(cost, links=None)
    busy = np.array([seconds for _, seconds in timed_order([without_shards.passes(plan) for plan in plans])])
    kinds = "".join(turn.kind[0].upper() for turn, _ in order)
    outside = _seconds(links.weights.reduce, device)  # of replicas: once, at the end
    if cost.links is not None:
        # FSDP2 gathers and reduces while a pass computes, so what it adds depends on the pass.
        last = kinds.rfind("B")
        outside = sum(
            float(cost.links.added_seconds(turn.kind, seconds, reduces=number == last or not reduces_last))
            for number, ((turn, _), seconds) in enumerate(zip(order, busy))
        )
    return _Times(kinds, sum(seconds for _, seconds in order), float(busy.sum()), outside)


def _sent(links: Links, plan: Plan, kinds: str, reduces_last: bool) -> dict[str, float]:
    """Count the bytes that each rank of the group with this plan sends, by purpose."""

    def sent(collectives: Iterable[Collective]) -> float:
        return sum(each.sent_bytes for each in collectives)

    tokens, again = plan.layout.num_tokens, plan.recomputed_tokens
    found = {
        name: (tokens + again) * each.sent_bytes + tokens * links.backward[name].sent_bytes
        for name, each in links.forward.items()
    }
    backward = kinds.count("B")
    sharded = links.weights.gather_ends[0].group.size > 1
    starts = sum(1 for before, kind in zip("B" + kinds, kinds) if before == "B")
    found["weights"] = len(kinds) * sent(links.weights.gather_layers) + starts * sent(links.weights.gather_ends)
    found["gradients"] = (1 if reduces_last or not sharded else backward) * sent(links.weights.reduce)
    return found


def _gb(count: float) -> str:
    return f"{count / 1e9:,.{1 if count >= 1e9 else 3}f} GB"
