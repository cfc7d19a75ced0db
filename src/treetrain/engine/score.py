"""Score now, backward later: the primitive that frameworks stand on.

`Scored` is what `TreeEngine.score` hands out: leaf tensors that any code may compute a loss from. When that loss's
backward has ended in the leaves, `Scored.backward` takes the gradients that lie there through the tree, once.

`Scoring` does the work for it, and for `treetrain.logprobs`, `values` and `rewards`, which are the same within
autograd. Where the graphs of all parts fit into the budget they are kept between the two, and nothing runs twice. Else
the parts are scored without graph, and run again when the gradients are known.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from treetrain.device_arrays import on_device
from treetrain.engine.batch import Batch
from treetrain.engine.evaluate import added_up
from treetrain.engine.executor import Executor
from treetrain.engine.lockstep import Reduces
from treetrain.engine.loss_gradients import KnownGradients, ScoreTable
from treetrain.engine.out_of_memory import PassCounts, why_not_again, within_memory
from treetrain.engine.packed import model_device, wide_dtype
from treetrain.engine.ranks import check_same, is_shard, waiting_gradients
from treetrain.engine.routing import Routing
from treetrain.engine.switches import check_switches, switches_of
from treetrain.errors import RanksDisagree
from treetrain.planning.plan import Plan
from treetrain.tree.layout import PackedLayout
from treetrain.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from treetrain.engine.engine import TreeEngine

T = TypeVar("T")


def is_live(engine: "TreeEngine") -> bool:
    """Whether anybody could ask for gradients of what is scored now."""
    return torch.is_grad_enabled() and any(p.requires_grad for p in engine.parameters)


class Scoring:
    """A batch that is scored now and may go backward later, once.

    Args:
        engine: prepared for the call.
        layout: what is computed of the tree.
        entropy, statistics: what is asked for beside log-probabilities.
        balanced: whether the routers' auxiliary loss is asked for.
    """

    def __init__(
        self,
        engine: "TreeEngine",
        tree: TokenTree,
        layout: PackedLayout,
        *,
        entropy: bool = False,
        statistics: bool = False,
        balanced: bool = False,
    ):
        self.engine, self.layout, self.live = engine, layout, is_live(engine)
        self.routing: Routing | None = engine.routing(tree, balanced=balanced)
        self.plan = self._planned()
        self.tokens_without_graph = 0
        device, wide = model_device(engine.model), wide_dtype(engine.model)
        sizes = layout.num_edges, len(layout.rows)
        self.table = ScoreTable(*sizes, wide, device, entropy=entropy, statistics=statistics)
        self._entropy, self._spent = entropy, False
        self._kept: Executor | None = None
        if self.live:
            self._weights, self._switches = self._fingerprint(), switches_of(engine)
        # Backward usually happens outside the caller's autocast; what is run again there needs it back.
        self._autocast: Callable[[], AbstractContextManager[Any]] = partial(
            torch.autocast,
            device.type,
            dtype=torch.get_autocast_dtype(device.type),
            enabled=torch.is_autocast_enabled(device.type),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )

    def _planned(self) -> Plan:
        """The engine's plan, and what becomes of the graphs; ranks in lockstep do the same."""
        if not self.live:
            return self.engine.plan_of(self.layout)
        plan = self.engine.plan_to_score(self.layout)
        if self.engine.in_lockstep:
            _, keeps = self.engine.ranks.agree("planning a score", lambda: (None, plan.scores_first == "kept"))
            if not all(keeps):
                plan = self.engine.plan_to_score(self.layout, keep=False)
        return plan

    def _fingerprint(self) -> Tensor:
        """[P] sums of the weights, frozen ones too (a part that is run again would see their new values).

        Version counters do not do: fused optimisers and writes through ``.data`` leave them as they are.
        """
        with torch.no_grad():
            weights = [getattr(p, "_local_tensor", p) for p in self.engine.parameters]
            sums = [p.sum(dtype=torch.float64) for p in weights]
        return torch.stack([total.to(sums[0].device) for total in sums])

    @property
    def aux(self) -> Tensor:
        """The auxiliary loss of the routers, before its coefficient; 0 where it was not asked for."""
        nothing = self.table.logprobs.new_zeros(())
        return nothing if self.routing is None or not self.routing.balanced else self.routing.loss.to(nothing)

    def forward(self) -> ScoreTable:
        """Score everything; returns the table, whose tensors are in no graph."""
        if self.layout.num_tokens or self.engine.in_lockstep:
            self._within_memory(self._forward)
        if self.routing is not None:
            self.routing.settle()
        return self.table

    def _forward(self, plan: Plan, counts: PassCounts) -> None:
        if self.routing is not None:
            self.routing.begin()
        keeps = plan.scores_first == "kept"
        executor = self.engine.executor(
            plan,
            counts,
            self.routing,
            gradients=keeps,
            statistics=self.table.statistics is not None,
            keep_logits=keeps and self.engine.has_room_for_logits(plan),
        )
        if keeps:
            executor.forward_all(self.table, need_entropy=self._entropy)
            self._kept = executor
        else:
            executor.score(self.table, need_entropy=self._entropy)

    def check_backward(self, what: str) -> None:
        """Raise RuntimeError where a backward now would not be that of what was scored.

        Args:
            what: the call that scored, for the message.
        """
        if not self.live:
            raise RuntimeError(
                f"{what} ran under torch.no_grad (or nothing is trained): there is no graph to go through"
            )
        if self._spent:
            raise RuntimeError(f"a second backward through {what}: its graph is freed by the first; call it again")
        if not torch.equal(self._weights, self._fingerprint()):
            raise RuntimeError(
                f"the model's weights have changed between {what} and its backward (an optimiser step?); gradients "
                "would be those of other weights: call backward first, or score again"
            )
        check_switches(self._switches, switches_of(self.engine), what)

    def backward(
        self,
        edges: Tensor,
        rows: Tensor | None,
        values: Tensor | None,
        aux: Tensor | float = 0.0,
        *,
        reduces: Reduces = "each",
        attempt: Callable[[Callable[[], None]], Any] = lambda run: run(),
    ) -> Any:
        """Add gradients to ``.grad``. Call `check_backward` first.

        Args:
            edges: [E] d loss / d log-probability.
            rows: [R] d loss / d entropy, or None.
            values: [R] or [R, c] d loss / d value, or None.
            aux: d loss / d auxiliary loss.
            reduces: which backwards reduce sharded gradients.
            attempt: calls what it is given, and leaves gradients as they were if that fails. Where memory runs out it
                is asked again, with smaller parts. What it returns is returned.
        """
        self._spent = True
        if self.routing is not None:
            self.routing.scale = torch.as_tensor(aux).double()
        if not self.layout.num_tokens and not self.engine.in_lockstep:
            return attempt(lambda: None)

        def run(plan: Plan, counts: PassCounts) -> Any:
            return attempt(lambda: self._backward(plan, counts, edges, rows, values, reduces))

        return self._within_memory(run)

    def _backward(
        self,
        plan: Plan,
        counts: PassCounts,
        edges: Tensor,
        rows: Tensor | None,
        values: Tensor | None,
        reduces: Reduces,
    ) -> None:
        executor, self._kept = self._kept, None
        if executor is not None:
            executor.backward_all(KnownGradients(self.table, edges, rows, values), reduces)
            return
        table = ScoreTable(len(edges), len(plan.layout.rows), edges.dtype, edges.device, entropy=self._entropy)
        again = self.engine.executor(plan, counts, self.routing, gradients=True, reduces=reduces)
        with self._autocast():
            again.train(KnownGradients(table, edges, rows, values))

    def _within_memory(self, run: Callable[[Plan, PassCounts], T]) -> T:
        if self.engine.in_lockstep:
            counts = PassCounts()
            found = run(self.plan, counts)
        else:
            smaller = partial(self.engine.smaller_plan_to_score, self.layout, live=self.live)
            found, self.plan, counts = within_memory(self.engine.model, self.plan, run, smaller)
        self.tokens_without_graph += counts.tokens_without_graph
        return found


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
    """[K] or [K, c]: what a reward model says of every trajectory; None if not asked for."""
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
    """Tokens that went through the model: the tree's, less what no wanted prediction depends on."""

    def __init__(self, scoring: Scoring, tree: TokenTree):
        self._scoring = scoring
        self._batch: Batch | None = None
        self._last: np.ndarray | None = None
        self.logprobs = []
        self.entropies = self.values = self.rewards = None
        self.is_top1 = self.mean_logits = self.log_sum_sq_probs = self.aux_loss = None
        self.flat_tokens, self.unique_tokens = tree.num_flat_tokens, tree.num_tokens
        self.computed_tokens = scoring.layout.num_tokens

    @classmethod
    def of_predictions(cls, scoring: Scoring, batch: Batch, *, values: bool, aux: bool) -> "Scored":
        """What a scoring gives for every prediction of a batch."""
        self, table, every = cls(scoring, batch.tree), scoring.table, batch.everything()
        self._batch = batch
        self.logprobs = self._leaves(every.of_edges(table.logprobs))
        if table.entropies is not None:
            self.entropies = self._leaves(every.of_rows(table.entropies))
        if values:
            self.values = self._leaves(every.of_rows(table.values_or_zeros))
        if table.statistics is not None:
            self.is_top1 = every.of_edges(table.statistics.is_top1)
            self.mean_logits = every.of_rows(table.statistics.mean_logits)
            self.log_sum_sq_probs = every.of_rows(table.statistics.log_sum_sq_probs)
        self.aux_loss = self._leaves([scoring.aux])[0] if aux else None
        return self

    @classmethod
    def of_rewards(cls, scoring: Scoring, tree: TokenTree, last: np.ndarray) -> "Scored":
        """Rewards alone.

        Args:
            last: int64 [K]: the row that holds the value of each trajectory's last token.
        """
        self = cls(scoring, tree)
        values = scoring.table.values_or_zeros
        self._last, self.rewards = last, self._leaves([values[on_device(last, values.device)]])[0]
        return self

    def _leaves(self, found: list[Tensor]) -> list[Tensor]:
        return [x.detach().clone().requires_grad_(self._scoring.live) for x in found]

    @property
    def plan(self) -> Plan:
        """The parts that are run; ``plan.scores_first`` says whether their graphs are kept or they run again."""
        return self._scoring.plan

    @property
    def recomputed_tokens(self) -> int:
        """Tokens run forward without graph so far, beside those of passes with graph."""
        return self._scoring.tokens_without_graph

    @property
    def parts(self) -> int:
        """Parts of the plan."""
        return self._scoring.plan.num_parts

    def backward(self, *, sync: bool = True) -> None:
        """Take the gradients that have arrived in the leaves through the tree, and add to the parameters' ``.grad``.

        Args:
            sync: over several ranks: replace gradients by their mean over the ranks (sharded ones: reduce them), as
                `DistributedDataParallel` does. False leaves every rank its own: for all calls of an accumulation but
                the last.

        Raises:
            RuntimeError: a second call; weights, adapters or what is trained changed since `score`; no gradient has
                arrived; a score under ``torch.no_grad``; memory ran out while gradients of earlier calls lay in
                ``.grad``.
            RanksDisagree: another rank could not make its own.
        """
        engine = self._scoring.engine
        never = why_not_again(engine.parameters, waiting_gradients(engine.model, engine.value_head))

        def checked() -> tuple[Any, Any]:
            self._scoring.check_backward("TreeEngine.score")
            return self._gradients(), sync

        def run(gradients: Any) -> tuple[None, Any]:
            attempt = partial(engine.undone_if_it_fails, never)
            self._scoring.backward(*gradients, reduces="each" if sync else "never", attempt=attempt)
            return None, None

        if not (sync or engine.in_lockstep):
            run(checked()[0])
            return
        try:
            # What can be wrong is found on every rank before any of them goes into a backward of all.
            gradients, told = engine.ranks.agree("Scored.backward", checked)
            check_same("sync", told)
            engine.ranks.agree("Scored.backward's passes", lambda: run(gradients))
        except RanksDisagree as error:
            engine.take_back(never, error)
            raise
        if sync:
            engine.ranks.average_gradients([p for p in engine.parameters if not is_shard(p)])

    def _gradients(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | float]:
        """What has arrived, by edge and row of the layout."""
        table, values = self._scoring.table, self._scoring.table.values
        leaves = [*self.logprobs, *(self.entropies or []), *(self.values or [])]
        leaves += [x for x in (self.rewards, self.aux_loss) if x is not None]
        if any(x.numel() for x in leaves) and all(x.grad is None for x in leaves):
            raise RuntimeError(
                "no gradient has arrived in what TreeEngine.score gave: call backward on a loss that is computed from "
                "it first"
            )
        nothing = torch.zeros_like(table.logprobs)
        if self._last is not None and self.rewards is not None:
            return nothing, None, None if values is None else added_up(values, self._last, self.rewards.grad), 0.0
        assert self._batch is not None
        every = self._batch.everything()
        used = on_device(np.flatnonzero(self._batch.used), table.device)

        def per_place(like: Tensor | None, leaves: list[Tensor] | None, places: np.ndarray) -> Tensor | None:
            if like is None or leaves is None:
                return None
            grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
            flat = torch.cat([like.new_zeros(0, *like.shape[1:]), *(g.to(like.dtype) for g in grads)])
            return added_up(like, places, flat.index_select(0, used))

        edges = per_place(table.logprobs, self.logprobs, every.edges)
        assert edges is not None
        aux = 0.0 if self.aux_loss is None or self.aux_loss.grad is None else self.aux_loss.grad
        rows = per_place(table.entropies, self.entropies, every.rows)
        return edges, rows, per_place(values, self.values, every.rows), aux
