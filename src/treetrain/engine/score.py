"""Score now, backward later: the primitive for integrations with frameworks.

`Scored` is what `TreeEngine.score` returns: leaf tensors that any code may compute a loss from. After that loss's
backward has filled their ``.grad``, `Scored.backward` runs these gradients through the tree, once.

`Scoring` runs the passes for it, for `treetrain.logprobs`, `values` and `rewards` (the same as autograd functions), and
for batch-scope losses. If the graphs of all parts fit into the budget, they are kept until backward, and nothing runs
twice. Else the parts are scored without graph, and run again in backward.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from treetrain.device_arrays import on_device
from treetrain.engine.distributed import check_same
from treetrain.engine.executor import Executor
from treetrain.engine.lockstep import Reduces
from treetrain.engine.loss_gradients import Batch, KnownGradients, ScoreTable, added_up
from treetrain.engine.memory import PassCounts
from treetrain.engine.packed import model_device
from treetrain.engine.routing import Routing
from treetrain.engine.runtime import Runtime
from treetrain.errors import RanksDisagree
from treetrain.planning.plan import Plan
from treetrain.tree.token_tree import TokenTree

_FIELDS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""Fields of peft's layers; `scaling` is set by adapter, at any time."""

Switches = dict[str, Any]
"""Values by the name of the setting."""


class _Trained(Protocol):
    model: nn.Module

    @property
    def parameters(self) -> list[nn.Parameter]: ...


def switches_of(engine: _Trained) -> Switches:
    """The current settings."""
    found: Switches = {}
    for name, module in engine.model.named_modules():
        if "_active_adapter" in vars(module):
            found |= {f"{field.lstrip('_')} of {name}": _copy(vars(module).get(field)) for field in _FIELDS}
    names = {id(p): name for name, p in engine.model.named_parameters()}
    for number, parameter in enumerate(engine.parameters):
        name = names.get(id(parameter), f"value head, parameter {number}")
        found[f"requires_grad of {name}"] = parameter.requires_grad
    return found


def check_switches(before: Switches, now: Switches, call: str) -> None:
    """Raise RuntimeError, naming the first difference, unless both are the same.

    Args:
        call: the call that scored.
    """
    for name in [*before, *now]:
        then, after = before.get(name, "not there"), now.get(name, "not there")
        if then != after:
            raise RuntimeError(
                f"the model was switched between {call} and its backward ({name} was {then} and is {after}); gradients "
                "would be those of another model: call backward first, or switch back, or score again"
            )


def _copy(value: Any) -> Any:
    """A copy that later changes do not reach."""
    if isinstance(value, dict):
        return tuple((key, _copy(entry)) for key, entry in value.items())
    return tuple(value) if isinstance(value, list) else value


Attempt = Callable[[Callable[[], None]], Any]
"""Calls a function, and restores gradients if that fails. `Scoring.backward` returns its result."""


class Scoring:
    """A batch that is scored now and may run backward later, once.

    Args:
        plan: the plan of the batch; whether graphs are kept is decided here.
        routing: what the call does with the routers of experts.
        entropy, statistics: whether to compute these too.
    """

    def __init__(
        self, runtime: Runtime, plan: Plan, routing: Routing | None, *, entropy: bool = False, statistics: bool = False
    ):
        self.runtime, self.routing, self.live = runtime, routing, runtime.live
        self.plan, self.layout = self._planned(plan), plan.layout
        self.tokens_without_graph = 0
        self.table = runtime.table(plan.layout, entropy=entropy, statistics=statistics)
        self._entropy, self._spent = entropy, False
        self._kept: Executor | None = None
        # Backward usually runs outside the caller's autocast, which parts that run again need.
        device = model_device(runtime.model).type
        self._autocast: Callable[[], AbstractContextManager[Any]] = partial(
            torch.autocast,
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )

    def _planned(self, plan: Plan) -> Plan:
        """The plan, with the graphs kept or not. Ranks in lockstep all keep them, or none does."""
        if not self.live:
            return plan
        keeps = self.runtime.keeps_graphs(plan)
        if self.runtime.in_lockstep:
            keeps = all(self.runtime.ranks.agree("planning a score", lambda: (None, keeps))[1])
        return plan.with_all_kept() if keeps else replace(plan, scores_first="recomputed")

    @property
    def aux(self) -> Tensor:
        """The auxiliary loss of the routers, before its coefficient; 0 if it was not asked for."""
        nothing = self.table.logprobs.new_zeros(())
        return nothing if self.routing is None or not self.routing.balanced else self.routing.loss.to(nothing)

    def forward(self) -> ScoreTable:
        """Score everything; returns the table, whose tensors are in no graph."""
        if self.layout.num_tokens or self.runtime.in_lockstep:
            self._within_memory(self._forward)
        if self.routing is not None:
            self.routing.settle()
        return self.table

    def _forward(self, plan: Plan, counts: PassCounts) -> None:
        if self.routing is not None:
            self.routing.begin()
        keeps = plan.scores_first == "kept"
        executor = self.runtime.executor(
            plan,
            counts,
            self.routing,
            gradients=keeps,
            statistics=self.table.statistics is not None,
            keep_logits=keeps and self.runtime.has_room_for_logits(plan),
        )
        if keeps:
            executor.forward_all(self.table, need_entropy=self._entropy)
            self._kept = executor
        else:
            executor.score(self.table, need_entropy=self._entropy)

    def backward(
        self,
        edges: Tensor,
        rows: Tensor | None,
        values: Tensor | None,
        aux: Tensor | float = 0.0,
        *,
        reduces: Reduces = "each",
        attempt: Attempt,
    ) -> Any:
        """Add gradients to ``.grad``.

        Args:
            edges: [E] d loss / d log-probability.
            rows: [R] d loss / d entropy, or None.
            values: [R] or [R, c] d loss / d value, or None.
            aux: d loss / d auxiliary loss.
            reduces: which backwards reduce sharded gradients.
            attempt: runs the passes. If memory runs out, it is called again with smaller parts.
        """
        self._spent = True
        if self.routing is not None:
            self.routing.scale = torch.as_tensor(aux).double()
        if not self.layout.num_tokens and not self.runtime.in_lockstep:
            return attempt(lambda: None)

        def passes(plan: Plan, counts: PassCounts) -> None:
            executor, self._kept = self._kept, None
            if executor is not None:
                executor.backward_all(KnownGradients(self.table, edges, rows, values), reduces)
                return
            table = ScoreTable(len(edges), len(plan.layout.rows), edges.dtype, edges.device, entropy=self._entropy)
            again = self.runtime.executor(plan, counts, self.routing, gradients=True, reduces=reduces)
            with self._autocast():
                again.train(KnownGradients(table, edges, rows, values))

        return self._within_memory(lambda plan, counts: attempt(lambda: passes(plan, counts)))

    def _within_memory(self, run: Callable[[Plan, PassCounts], Any]) -> Any:
        result, self.plan, counts = self.runtime.within_memory(self.plan, run)
        self.tokens_without_graph += counts.tokens_without_graph
        return result


class LiveScoring(Scoring):
    """A scoring whose backward the caller runs; the model must not change before that.

    Args:
        name: the call that scores, for messages.
    """

    def __init__(self, *given: Any, name: str, **options: Any):
        super().__init__(*given, **options)
        self._name = name
        if self.live:
            self._weights, self._switches = self._weight_sums(), switches_of(self.runtime)

    def _weight_sums(self) -> Tensor:
        """[P] sums of the weights, frozen ones too (a part that runs again would see their new values).

        Version counters are not enough: fused optimisers and writes through ``.data`` do not change them.
        """
        with torch.no_grad():
            weights = (getattr(p, "_local_tensor", p) for p in self.runtime.parameters)
            sums = [p.sum(dtype=torch.float64) for p in weights]
        return torch.stack([total.to(sums[0].device) for total in sums])

    def check_backward(self) -> None:
        """Raise RuntimeError if a backward now would not match the scores."""
        name = self._name
        if not self.live:
            raise RuntimeError(
                f"{name} ran under torch.no_grad (or nothing is trained): there is no graph to go through"
            )
        if self._spent:
            raise RuntimeError(f"a second backward through {name}: its graph is freed by the first; call it again")
        if not torch.equal(self._weights, self._weight_sums()):
            raise RuntimeError(
                f"the model's weights have changed between {name} and its backward (an optimiser step?); gradients "
                "would be those of other weights: call backward first, or score again"
            )
        check_switches(self._switches, switches_of(self.runtime), name)


class Scored:
    """Scores of a batch, to compute a loss from; made by `TreeEngine.score`.

    The tensors are leaves. Call ``backward`` on a loss that is computed from them, then `backward` here.
    """

    logprobs: list[Tensor]
    """K tensors [L_k - 1], in nats: entry t is the log-probability of token t + 1 of a trajectory."""
    entropies: list[Tensor] | None
    """K tensors [L_k - 1], in nats: entropy of the distribution that token t + 1 was drawn from; None if not asked."""
    values: list[Tensor] | None
    """K tensors [L_k - 1] or [L_k - 1, c]: value of the state before token t + 1; None if not asked for."""
    rewards: Tensor | None
    """[K] or [K, c]: a reward model's value of every trajectory; None if not asked for."""
    is_top1: list[Tensor] | None
    """K tensors bool [L_k - 1]: whether token t + 1 is the most likely one; None without statistics."""
    mean_logits: list[Tensor] | None
    """K tensors [L_k - 1]: mean logit over the vocabulary, divided by the temperature; None without statistics."""
    log_sum_sq_probs: list[Tensor] | None
    """K tensors [L_k - 1]: log of the sum of squared probabilities; None without statistics."""
    aux_loss: Tensor | None
    """The routers' auxiliary loss over all tokens of all trajectories, before its coefficient; None for a model whose
    configuration does not ask for it."""
    flat_tokens: int
    """Tokens summed over the trajectories."""
    unique_tokens: int
    """Tokens of the tree."""
    computed_tokens: int
    """Tokens that went through the model: the tree's, less those that no wanted prediction depends on."""

    def __init__(self, scoring: LiveScoring, tree: TokenTree, batch: Batch | np.ndarray, *, values: bool, aux: bool):
        """Make the leaves.

        Args:
            batch: the predictions of the tree; for rewards int64 [K], the row that holds each trajectory's value.
        """
        self._scoring, self._batch = scoring, batch
        self.logprobs = []
        self.entropies = self.values = self.rewards = None
        self.is_top1 = self.mean_logits = self.log_sum_sq_probs = None
        self.flat_tokens, self.unique_tokens = tree.num_flat_tokens, tree.num_tokens
        self.computed_tokens = scoring.layout.num_tokens
        table = scoring.table

        def leaves(found: list[Tensor]) -> list[Tensor]:
            return [x.detach().clone().requires_grad_(scoring.live) for x in found]

        self.aux_loss = leaves([scoring.aux])[0] if aux else None
        if not isinstance(batch, Batch):
            rewards = table.values_or_zeros
            self.rewards = leaves([rewards[on_device(batch, rewards.device)]])[0]
            return
        every = batch.everything()
        self.logprobs = leaves(every.of_edges(table.logprobs))
        if table.entropies is not None:
            self.entropies = leaves(every.of_rows(table.entropies))
        if values:
            self.values = leaves(every.of_rows(table.values_or_zeros))
        if table.statistics is not None:
            self.is_top1 = every.of_edges(table.statistics.is_top1)
            self.mean_logits = every.of_rows(table.statistics.mean_logits)
            self.log_sum_sq_probs = every.of_rows(table.statistics.log_sum_sq_probs)

    @property
    def plan(self) -> Plan:
        """The plan of the parts; ``plan.scores_first`` says whether graphs are kept or parts run again."""
        return self._scoring.plan

    @property
    def recomputed_tokens(self) -> int:
        """Tokens run forward without graph so far."""
        return self._scoring.tokens_without_graph

    @property
    def parts(self) -> int:
        """Parts of the plan."""
        return self._scoring.plan.num_parts

    def backward(self, *, sync: bool = True) -> None:
        """Run the leaves' gradients backward through the tree, and add to the parameters' ``.grad``.

        Args:
            sync: with several ranks, average gradients over them (reduce sharded ones), as `DistributedDataParallel`
                does. False leaves them local; pass it in all calls of an accumulation but the last.

        Raises:
            RuntimeError: a second call; weights, adapters or what is trained changed since `score`; no gradient has
                arrived; a score under ``torch.no_grad``; memory ran out while gradients of earlier calls lay in
                ``.grad``.
            RanksDisagree: another rank failed, or has another `sync`.
        """
        runtime, rollback = self._scoring.runtime, self._scoring.runtime.rollback()

        def gradients() -> Any:
            self._scoring.check_backward()
            return self._gradients()

        def passes(found: Any) -> None:
            self._scoring.backward(*found, reduces="each" if sync else "never", attempt=rollback.attempt)

        if not (sync or runtime.in_lockstep):
            passes(gradients())
            return
        try:
            # Every rank checks for errors before any of them starts the collective backward.
            found, syncs = runtime.ranks.agree("Scored.backward", lambda: (gradients(), sync))
            check_same("sync", syncs)
            runtime.ranks.agree("Scored.backward's passes", lambda: (passes(found), None))
        except RanksDisagree as error:
            rollback.undo(error)
            raise
        if sync:
            runtime.ranks.average_gradients(runtime.whole_parameters)

    def _gradients(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | float]:
        """The leaves' gradients, by edge and row of the layout."""
        table = self._scoring.table
        leaves = [*self.logprobs, *(self.entropies or []), *(self.values or [])]
        leaves += [x for x in (self.rewards, self.aux_loss) if x is not None]
        if any(x.numel() for x in leaves) and all(x.grad is None for x in leaves):
            raise RuntimeError(
                "no gradient has arrived in what TreeEngine.score gave: call backward on a loss that is computed from "
                "it first"
            )
        if self.rewards is not None:
            assert isinstance(self._batch, np.ndarray)
            values = None if table.values is None else added_up(table.values, self._batch, self.rewards.grad)
            return torch.zeros_like(table.logprobs), None, values, 0.0
        assert isinstance(self._batch, Batch)
        every = self._batch.everything()
        used = on_device(np.flatnonzero(self._batch.used), table.device)

        def by_place(like: Tensor, leaves: list[Tensor], places: np.ndarray) -> Tensor:
            grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
            flat = torch.cat([like.new_zeros(0, *like.shape[1:]), *(g.to(like.dtype) for g in grads)])
            return added_up(like, places, flat.index_select(0, used))

        edges, rows, values = by_place(table.logprobs, self.logprobs, every.edges), None, None
        if table.entropies is not None and self.entropies is not None:
            rows = by_place(table.entropies, self.entropies, every.rows)
        if table.values is not None and self.values is not None:
            values = by_place(table.values, self.values, every.rows)
        return edges, rows, values, 0.0 if self.aux_loss is None or self.aux_loss.grad is None else self.aux_loss.grad
