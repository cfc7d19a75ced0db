"""Predict a training step over many ranks, and find the fastest way to split a model and a batch over them.

No process is started. N ranks are divided in four ways; a `Split` is one combination of sizes:

    tensor   ranks hold 1/t of the weights each, and the same tokens
    context  ranks hold 1/c of the tokens of every part
    data     groups of c x t ranks hold different rows; FSDP2 shards the weights over all of them, over those of a
             node (with a copy in every node), or not at all
    expert   experts are divided over e of these ranks; tokens travel to their experts

A group of c x t ranks is one rank to the planner. A token costs each of them a share of the arithmetic and of the
memory, plus the links' time. So a step's time is predicted as for one rank (``cost.py``), with three differences:

1. Collectives within a layer (all-to-all of heads or of experts' tokens, all-reduce of tensor parallel) are on the
   critical path: they add seconds per token and per pass.
2. FSDP2 gathers the weights in every pass and reduces the gradients in a backward. A GPU overlaps this with the
   arithmetic, except for the first layer (`WeightLinks`). All ranks run every pass together, so each waits for the
   slowest (``collective_order.py``).
3. Whole copies of weights, or of shards, all-reduce their gradients.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from treetrain.planning.balance import Balancer
from treetrain.planning.collective_order import plan_ranks, timed_order
from treetrain.planning.cost import CostModel, ModelCounts, Speeds, WeightLinks
from treetrain.planning.devices import AMPLE, USABLE, Collective, Device
from treetrain.planning.make import Bytes, parse_budget
from treetrain.planning.plan import Plan
from treetrain.tree.token_tree import TokenTree

OPTIMISER_BYTES = 28
"""Bytes that float32 AdamW moves per parameter: reads weight, gradient and two moments, writes weight and moments."""
TENSOR_FORWARD, TENSOR_BACKWARD, TENSOR_BACKWARD_EXPERTS = 2, 5, 4
"""All-reduces of hidden states per layer in transformers' tensor parallel. Forward: the outputs of attention and MLP.
Backward: the gradients of the inputs of query, key, value, gate and up projection; one for all experts."""


class Split(NamedTuple):
    """One way to use N ranks. Ranks of one tensor group are neighbours; then come context, shards and copies."""

    ranks: int
    tensor: int = 1
    context: int = 1
    expert: int = 1
    shards: int = 1
    """Ranks that together hold one copy of the weights (or of a tensor rank's share); 1: every rank holds one."""

    @property
    def data(self) -> int:
        """Groups of ranks with rows of their own."""
        return self.ranks // (self.tensor * self.context)

    @property
    def copies(self) -> int:
        """Copies of the weights."""
        return self.ranks // (self.tensor * self.shards)

    @property
    def expert_division(self) -> int:
        """Neighbouring ranks that divide the experts: those of `expert`, else those of `tensor`."""
        return self.expert if self.expert > 1 else self.tensor

    @property
    def expert_shards(self) -> int:
        """As `shards`, for the experts."""
        return max(1, self.shards * self.tensor // self.expert_division)

    @property
    def in_engine(self) -> bool:
        """Whether `TreeEngine` runs it: data and context parallel, with whole weights or FSDP2 over all ranks or over
        those of a context group; or tensor parallel alone, with experts over the same ranks."""
        if self.tensor == self.expert == 1:
            return self.context == 1 or self.shards in (1, self.context, self.ranks)
        return self.data == self.context == self.shards == 1 and self.expert in (1, self.tensor)

    def __str__(self) -> str:
        sizes = {"data": self.data, "context": self.context, "tensor": self.tensor, "expert": self.expert}
        said = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
        copies = f" in each of {self.copies} copies" if self.copies > 1 else ""
        return said + (f", weights sharded over {self.shards}{copies}" if self.shards > 1 else "")


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
    """FSDP: added by the common order of passes."""
    link_seconds: dict[str, float]
    """Time that the links add, without the part that overlaps arithmetic: within layers, weights and gradients."""
    optimiser_seconds: float
    sent_bytes: dict[str, float]
    """Bytes that a rank of the group with the most tokens sends: context, tensor, experts, weights, gradients."""
    memory: dict[str, float]
    """Bytes on the fullest rank: weights, gradients, optimiser, gathered (FSDP's temporarily whole layers), activations
    and KV cache."""

    @property
    def step_seconds(self) -> float:
        """Work, waiting, links and optimiser."""
        return self.work_seconds + self.waiting_seconds + sum(self.link_seconds.values()) + self.optimiser_seconds

    @property
    def link_share(self) -> float:
        """The links' share of the step."""
        return sum(self.link_seconds.values()) / self.step_seconds if self.step_seconds else 0.0

    @property
    def peak_bytes(self) -> float:
        """All memory on the fullest rank."""
        return sum(self.memory.values())


# ---- the possible splits


def splits_of(
    counts: ModelCounts,
    ranks: int,
    device: Device,
    *,
    context: int | None = None,
    tensor: int | None = None,
    expert: int | None = None,
) -> list[Split]:
    """List the splits of `ranks` ranks that fit the model; where a size is None, several are listed.

    Raises:
        ValueError: sizes that do not divide the ranks, heads, vocabulary or experts; the message names those that do.
    """
    node = int(device.node_ranks)
    if ranks > node and ranks % node:
        low = ranks // node * node
        raise ValueError(f"{ranks} ranks do not fill nodes of {node}; give {low} or {low + node} ranks")
    shared = f"{counts.heads} heads, {counts.kv_heads} key/value heads"
    fits = [n for n in _divisors(ranks) if counts.heads % n == counts.kv_heads % n == 0]
    tensors = [n for n in fits if -(-counts.vocab // n) * (n - 1) < counts.vocab]  # no rank without vocabulary
    experts = [n for n in _divisors(ranks) if n == 1 or (counts.experts and counts.experts % n == 0)]
    held = f"{counts.experts} experts" if counts.experts else "no experts"
    for name, given, fitting, what in (
        ("context", context, fits, shared),
        ("tensor", tensor, tensors, f"{shared} and a vocabulary of {counts.vocab}"),
        ("expert", expert, experts, held),
    ):
        if given is not None and given not in fitting:
            sizes = ", ".join(map(str, fitting))
            raise ValueError(f"{name} {given}: a model with {what} cannot be divided so on {ranks} ranks; {sizes} can")
    found = []
    for t in tensors if tensor is None else [tensor]:
        for c in fits if context is None else [context]:
            if c * t not in fits:
                continue
            over = {ranks // t, 1} | ({node // t} if ranks > node and node % t == 0 else set())
            for shards in sorted(over, reverse=True):
                within = [n for n in experts if shards * t % n == 0]
                # Without a given size: no division, the largest within a node, and the largest of all.
                tried = {1, max(n for n in within if n <= node), max(within)}
                tried = tried if expert is None else {expert} & {*within}
                found += [Split(ranks, t, c, e, shards) for e in sorted(tried)]
    if not found:
        sizes = ", ".join(f"{a} x {b}" for a in fits for b in tensors if a * b in fits)
        raise ValueError(
            f"context {context}, tensor {tensor}, expert {expert} do not go together on {ranks} ranks and {shared}; "
            f"expert must divide the ranks that share the weights, and context x tensor may be {sizes}"
        )
    return found


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


# ---- the cost of a split


def share_of(counts: ModelCounts, split: Split) -> ModelCounts:
    """Counts of one rank, per token of its group. The router's choices are assumed to be even."""
    t, tokens = split.tensor, split.context
    b, wide, hidden = counts.dtype_bytes, counts.wide_bytes, counts.hidden
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


class _Links(NamedTuple):
    """The collectives of a rank. Those in layers have bytes per token of the group, and calls per pass."""

    forward: dict[str, Collective]
    """In the layers: context, tensor, experts."""
    backward: dict[str, Collective]
    gather_layers: list[Collective]
    gather_ends: list[Collective]
    """Embedding, head and last norm, which stay gathered from the first forward to the next backward."""
    reduce: list[Collective]


def links_of(own: ModelCounts, split: Split, device: Device) -> _Links:
    """The collectives of a rank with these counts (`share_of`)."""
    b, wide, layers = own.dtype_bytes, own.wide_bytes, own.layers
    queries, cached = sum(own.flops_by_range.values()) / 4, own.cache_token / (b + wide)  # numbers per token
    heads, states = device.group(split.context, split.tensor), device.group(split.tensor)
    experts = device.group(split.expert)
    state, chosen = own.hidden * b, own.experts_per_token * own.hidden * b / split.tensor  # bytes of a token

    def within_layers(sums: int) -> dict[str, Collective]:
        return {
            # Before and after attention.
            "context": Collective("all-to-all", heads, (2 * queries + cached) * b, 2 * layers),
            "tensor": Collective("all-reduce", states, state * sums, sums),
            "experts": Collective("all-to-all", experts, 2 * layers * chosen, 2 * layers),
        }

    forward = within_layers(TENSOR_FORWARD * layers + 1)  # and the embedding
    backward = within_layers(layers * (TENSOR_BACKWARD_EXPERTS if own.experts else TENSOR_BACKWARD))
    if own.checkpointing:
        for name, each in forward.items():
            again = backward[name]
            backward[name] = each._replace(
                whole_bytes=each.whole_bytes + again.whole_bytes, calls=each.calls + again.calls
            )
    over = device.group(split.shards, split.tensor)
    copies = device.group(split.copies, split.tensor * split.shards)
    e_shards, e_stride = split.expert_shards, split.expert_division
    e_over = device.group(e_shards, e_stride)
    e_copies = device.group(split.ranks // (e_shards * e_stride), e_stride * e_shards)
    expert, ends = own.expert_parameters, own.parameters - own.parameters_in_layers
    rest, e_calls = own.parameters_in_layers - expert, layers if expert else 0
    return _Links(
        forward,
        backward,
        gather_layers=[
            Collective("all-gather", over, b * rest, layers),
            Collective("all-gather", e_over, b * expert, e_calls),
        ],
        gather_ends=[Collective("all-gather", over, b * ends)],
        reduce=[
            Collective("reduce-scatter", over, wide * (rest + ends), layers + 1),
            Collective("reduce-scatter", e_over, wide * expert, e_calls),
            Collective("all-reduce", copies, wide * (rest + ends) / split.shards, layers * (split.shards > 1) + 1),
            Collective("all-reduce", e_copies, wide * expert / e_shards, e_calls),
        ],
    )


def _seconds(collectives: Iterable[Collective], device: Device) -> float:
    return sum(each.seconds(device) for each in collectives)


def cost_of_split(
    counts: ModelCounts, split: Split, device: Device, speeds: Speeds | None = None
) -> tuple[CostModel, CostModel, _Links]:
    """The cost model of a group of ranks without links and with them, and the links.

    Args:
        speeds: measured speeds of a rank; None: those of the device's description.
    """
    own = share_of(counts, split)
    alone = CostModel(counts=own, speeds=speeds or Speeds.on(device, own), device=device.kind)
    links, speeds = links_of(own, split, device), alone.speeds
    # Collectives within layers add seconds to every token and to every pass.
    (pass_forward, token_forward), (pass_backward, token_backward) = (
        (_seconds((each._replace(whole_bytes=0.0) for each in those), device), _seconds(those, device))
        for those in (links.forward.values(), links.backward.values())
    )
    both = (1 + speeds.backward_ratio) * own.token_flops
    added = token_forward - pass_forward + token_backward - pass_backward
    speeds = replace(
        speeds,
        layers=both / (both / speeds.layers + added),
        graph_pass=speeds.graph_pass + pass_forward + pass_backward,
        forward_pass=speeds.forward_pass + pass_forward,
    )
    return alone, replace(alone, speeds=speeds, links=_weight_links(links, split, device, own.layers)), links


def engine_cost(counts: ModelCounts, split: Split, device: Device) -> CostModel:
    """The cost model that the engine plans with: that of the whole model, with FSDP's links."""
    links = links_of(share_of(counts, split), split, device)
    return replace(CostModel.on(device, counts), links=_weight_links(links, split, device, counts.layers))


def _weight_links(links: _Links, split: Split, device: Device, layers: int) -> WeightLinks | None:
    """FSDP's seconds in each pass; None if the weights are whole."""
    if split.shards == 1:
        return None
    gather = _seconds(links.gather_layers, device)
    return WeightLinks(
        forward=gather + _seconds(links.gather_ends, device),
        backward=gather,
        reduce=_seconds(links.reduce, device),
        first=1.0 if device.kind == "cpu" else 1 / layers,
    )


def state_bytes(own: ModelCounts, split: Split) -> dict[str, float]:
    """Bytes on a rank besides those of a plan, for a rank with these counts (`share_of`).

    FSDP temporarily gathers the weights of two layers, embedding and head, and holds a layer's unsharded gradients.
    """
    wide, b, expert = own.wide_bytes, own.dtype_bytes, own.expert_parameters
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
    budget: Any = None,
    speeds: Speeds | None = None,
    planned_for: Device | None = None,
) -> list[Simulation | Refused]:
    """Predict the step of a batch for each split, in the order given.

    Args:
        counts: the model's counts in the device's dtype.
        budget: the budget of every rank, as in `make_plan`; None: the device's memory minus the state.
        speeds: measured speeds of a rank; None: those of the device's description.
        planned_for: the device whose description the engine plans with; None: plans are made for the split itself.
    """
    budget, usable = parse_budget(budget), USABLE[device.kind] * device.memory_bytes
    balancer = Balancer(tree, CostModel.on(planned_for or device, counts))

    def predicted(split: Split) -> Simulation | Refused:
        alone, cost, links = cost_of_split(counts, split, device, speeds)
        own, held = alone.counts, state_bytes(alone.counts, split)
        state = sum(held.values())
        free = int(usable - state)
        if budget is None and free <= 0:
            needed = f"weights, gradients and optimiser state need {_gb(state)}"
            return Refused(split, f"{needed} of {_gb(usable)} usable on each rank")
        aligned = split.shards > 1 or split.expert > 1
        try:
            dispatch, plans = plan_ranks(
                tree,
                cost if planned_for is None else engine_cost(counts, split, planned_for),
                split.data,
                budget=budget * split.context if isinstance(budget, int) else budget,
                free_bytes=free if budget is None else None,
                aligned=aligned,
                balancer=balancer,
            )
        except ValueError as error:
            return Refused(split, f"{error}")
        memory = max((cost.bytes_by(plan) for plan in plans), key=lambda by: sum(by.values()))
        memory = held | {"activations": sum(memory.values()) - memory["KV cache"], "KV cache": memory["KV cache"]}
        whole = own.wide_bytes * own.parameters
        room = budget.count if isinstance(budget, Bytes) else free
        reduces_last = AMPLE * (sum(memory.values()) - state + whole) <= room
        if reduces_last and split.shards > 1:
            memory["gathered"] += whole
        # The time of the passes without links, with those within layers, and with FSDP's.
        work = [alone.passes(plan) for plan in plans]
        seconds = np.array([sum(passes.seconds) for passes in work])
        busy = [replace(cost, links=None).passes(plan) for plan in plans]
        together = range(len(plans)) if aligned else [int(seconds.argmax())]
        order = timed_order([work[rank] for rank in together])
        spent = np.array([s for _, s in timed_order([busy[rank] for rank in together])])
        total, kinds = sum(s for _, s in order), "".join(turn.kind[0].upper() for turn, _ in order)
        outside = _seconds(links.reduce, device)
        if cost.links is not None:
            last = kinds.rfind("B")
            outside = sum(
                float(cost.links.exposed(turn.kind, own_seconds, reduces=number == last or not reduces_last))
                for number, ((turn, _), own_seconds) in enumerate(zip(order, spent))
            )
        parameters = held["weights"] / own.wide_bytes
        tokens, mean = [plan.layout.num_tokens for plan in plans], float(seconds.mean())
        return Simulation(
            split=split,
            idle_ranks=int((dispatch.tokens == 0).sum()) * split.tensor * split.context,
            imbalance=float(seconds.max()) / mean if mean else 1.0,
            tokens=tokens,
            parts=max(plan.num_parts for plan in plans),
            passes=max(len(kinds), *(len(own.kinds) for own in work)),
            work_seconds=float(seconds.max()),
            waiting_seconds=total - float(seconds.max()),
            link_seconds={"within layers": float(spent.sum()) - total, "weights and gradients": outside},
            optimiser_seconds=parameters * OPTIMISER_BYTES / device.memory_bandwidth,
            sent_bytes=_sent(links, plans[int(np.argmax(tokens))], kinds, reduces_last),
            memory=memory,
        )

    return [predicted(split) for split in splits]


def _sent(links: _Links, plan: Plan, kinds: str, reduces_last: bool) -> dict[str, float]:
    """Bytes that each rank of the group with this plan sends, by purpose."""

    def sent(collectives: Iterable[Collective]) -> float:
        return sum(each.sent_bytes for each in collectives)

    tokens, again = plan.layout.num_tokens, plan.recomputed_tokens
    found = {
        name: (tokens + again) * each.sent_bytes + tokens * links.backward[name].sent_bytes
        for name, each in links.forward.items()
    }
    backward = kinds.count("B")
    sharded = links.gather_ends[0].group.size > 1
    starts = sum(1 for before, kind in zip("B" + kinds, kinds) if before == "B")
    found["weights"] = len(kinds) * sent(links.gather_layers) + starts * sent(links.gather_ends)
    found["gradients"] = (1 if reduces_last or not sharded else backward) * sent(links.reduce)
    return found


# ---- the verdict


def verdict(
    found: Sequence[Simulation | Refused], device: Device, linear: Sequence[Simulation | Refused] = ()
) -> Iterator[str]:
    """Sentences on which split is fastest, why, what the tree gains, and how copies compare with shards over all ranks.

    Args:
        linear: the same tokens trained row by row, on splits of the same ranks.
    """
    done = sorted((one for one in found if isinstance(one, Simulation)), key=lambda one: one.step_seconds)
    if not done:
        return
    best = done[0]
    split, spent = best.split, best.step_seconds
    others = [one for one in done if one.split[1:3] != split[1:3]]
    said = f"Fastest: {split}: {spent:.3g} s a step, {best.link_share:.0%} of it links"
    said += f" and {best.waiting_seconds / spent:.0%} waiting" if best.waiting_seconds > 0.005 * spent else ""
    if others:
        other, slower = others[0], others[0].step_seconds / spent
        reasons = {
            "arithmetic and balance": other.work_seconds - best.work_seconds,
            "waiting": other.waiting_seconds - best.waiting_seconds,
            "links": sum(other.link_seconds.values()) - sum(best.link_seconds.values()),
        }
        reason = max(reasons, key=lambda name: reasons[name])
        said += f"; {other.split} takes {slower:.2f} times as long, mostly by {reason}"
    yield said + "."
    apart = min((one for one in linear if isinstance(one, Simulation)), key=lambda one: one.step_seconds, default=None)
    if apart is not None:
        ratio = f"{apart.step_seconds / spent:.2f} times as long, {apart.step_seconds:.3g} s"
        yield f"Without a tree, the rows that no other row extends take {ratio} on {apart.split}, each row by itself."
    elif linear:
        yield "Without a tree, the rows that no other row extends fit into the memory of none of these splits."
    here = next((one for one in done if one.split.in_engine), None)
    if here is not None and here is not best:
        yield (
            f"TreeEngine does not combine these yet; the fastest that it runs is {here.split}: {here.step_seconds:.3g} "
            "s. tt.attention brings tree attention into a framework that does."
        )
    same = {one.split.shards: one for one in done if one.split[:4] == split[:4]}
    node, whole = int(device.node_ranks) // split.tensor, split.ranks // split.tensor
    if split.ranks <= device.node_ranks or device.node_ranks == 1:
        return
    if node in same and whole in same:
        inside, over = same[node].step_seconds, same[whole].step_seconds
        better, worse = ("better", over / inside) if inside < over else ("worse", inside / over)
        yield (
            f"A copy of the weights in every node of {int(device.node_ranks)} ranks (hybrid sharding) is {better} than "
            f"one over all {split.ranks}: {inside:.3g} s against {over:.3g} s, {worse:.2f} times."
        )
    elif whole in same:
        yield f"A copy of the weights in every node of {int(device.node_ranks)} ranks does not fit into the memory."


def _gb(count: float) -> str:
    return f"{count / 1e9:,.{1 if count >= 1e9 else 3}f} GB"
