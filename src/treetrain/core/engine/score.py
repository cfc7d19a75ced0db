"""Score now, backward later: the primitive for integrations with frameworks.

`TreeEngine.score` returns a `Scored`: leaf tensors from which any code may compute a loss. After that loss's backward
has filled their ``.grad``, `Scored.backward` runs these gradients through the tree, once. `treetrain.logprobs`,
`values` and `rewards` do the same within one autograd node.

`Scoring` runs the passes for all of them and for batch-scope losses. The graphs that fit into the budget are kept until
backward, those first that would take longest to make again (`core/planning/kept_graphs.py`). The other parts are scored
without graph and run again in backward.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from treetrain.core.device_arrays import on_device
from treetrain.core.engine.deferred import Deferral, gradients_aside
from treetrain.core.engine.engine_model import Call
from treetrain.core.engine.executor import Executor
from treetrain.core.engine.extension import Extension, LossExtension, Reduces
from treetrain.core.engine.loss_gradients import (
    Batch,
    KnownGradients,
    ScoreTable,
    Selection,
    evaluate_gradients,
    sum_by_place,
)
from treetrain.core.engine.memory import Rollback, Try
from treetrain.core.engine.model_passes import ModelPasses
from treetrain.core.engine.model_state import ScoredModel
from treetrain.core.engine.ranks import Ranks
from treetrain.core.head.lm_head import Scores
from treetrain.core.hf.capability import is_checkpointed
from treetrain.core.hf.tree_mode import instance_of
from treetrain.core.losses.facts import Metrics
from treetrain.core.losses.protocol import Loss
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.token_tree import TokenTree
from treetrain.core.tree.trajectory import Trajectory


class Scoring:
    """A batch that is scored now and may run backward later, once.

    Args:
        plan: the plan of the batch; this class decides whether its graphs are kept.
        attach: makes the extensions of a try.
        entropy, statistics: whether to compute these too.
    """

    def __init__(
        self,
        call: Call,
        plan: Plan,
        attach: Callable[[], list[Extension]],
        *,
        entropy: bool = False,
        statistics: bool = False,
        passes_type: type[ModelPasses] = ModelPasses,
    ):
        self.call, self._attach, self.live = call, attach, call.prepared.live
        self.plan, self.layout = plan, plan.layout
        if self.live:
            # Where passes are collective, all ranks keep graphs (each its own choice of parts), or none does.
            ranks = call.sharing.ranks if call.sharing.collective else Ranks()
            first = call.plan_keeping_graphs(plan)  # None: not even the caches of all parts fit
            keeps = all(ranks.exchange(first is not None))
            self.plan = first if keeps and first is not None else replace(plan, scores_first="recomputed")
        self.tokens_without_graph, self.attention = 0, Counter[str]()
        self.table = call.table(plan.layout, entropy=entropy, statistics=statistics)
        self.added_loss: LossExtension | None = None
        """The extension with a loss of the model's own; None for a model without one."""
        self._extensions: list[Extension] = []
        self._passes_type = passes_type
        self._kept: tuple[Executor[Scores], ModelPasses] | None = None
        # Backward usually runs outside the caller's autocast, but parts that run again need it.
        device = call.device.type
        self._autocast: Callable[[], AbstractContextManager[object]] = partial(
            torch.autocast,
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )

    def forward(self) -> ScoreTable:
        """Score everything; returns the table. Its tensors have no graph."""
        if self._has_passes:
            for attempt in self.call.tries(self.plan):
                with attempt:
                    self._forward(attempt)
            self._count(attempt)
        else:
            self._extensions = self._attach()
        self.added_loss = instance_of(LossExtension, self._extensions)
        if self.added_loss is not None:
            self.added_loss.settle()
        return self.table

    def _forward(self, attempt: Try) -> None:
        plan, keeps = attempt.plan, attempt.plan.scores_first == "kept"
        self._extensions = self._attach()
        logits = keeps and self.call.keeps_logits(plan)  # else the head makes them again in backward
        passes = self._passes_type(self.call, self._extensions, attempt.counts, self.table, keep_logits=logits)
        executor = Executor(plan, passes, gradients=keeps)
        if keeps:
            executor.forward_all()
            self._kept = executor, passes
        else:
            executor.score()

    def backward(
        self,
        edges: Float[Tensor, " E"],
        rows: Float[Tensor, " R"] | None,
        values: Float[Tensor, " R *c"] | None,
        added: Tensor | float,
        reduces: Reduces,
        rollback: Rollback,
    ) -> None:
        """Add gradients to ``.grad``.

        Args:
            edges, rows, values, added: d loss / d log-probabilities, entropies, values, the model's own loss.
            reduces: which backwards reduce gradients over processes.
            rollback: restores gradients if memory runs out.
        """
        if self.added_loss is not None:
            self.added_loss.scale = torch.as_tensor(added).double()
        self.call.attach_hooks(self._extensions)
        for extension in self._extensions:
            extension.reduces = reduces
        if not self._has_passes:
            return
        for attempt in self.call.tries(self.plan, rollback):
            with attempt:
                self._backward(attempt, edges, rows, values)
        self._count(attempt)

    def _backward(self, attempt: Try, edges: Tensor, rows: Tensor | None, values: Tensor | None) -> None:
        kept, self._kept = self._kept, None
        table = self.call.table(attempt.plan.layout, entropy=rows is not None)  # for parts that run again
        gradients = KnownGradients(table, edges, rows, values)
        if kept is not None:
            executor, passes = kept  # they go on in this try: its counts, and gradients that are known by now
            attempt.counts.alive, passes.counts = passes.counts.alive, attempt.counts
            passes.table, passes.gradients = table, gradients
            with self._autocast():
                executor.backward_all()
            return
        passes = self._passes_type(self.call, self._extensions, attempt.counts, table, gradients)
        with self._autocast():
            Executor(attempt.plan, passes, gradients=True).train()

    @property
    def _has_passes(self) -> bool:
        return self.layout.num_tokens > 0 or self.call.sharing.collective

    def _count(self, attempt: Try) -> None:
        self.plan = attempt.plan
        self.tokens_without_graph += attempt.counts.tokens_without_graph
        self.attention.update(attempt.counts.attention)


def run_batch_loss(
    loss: Loss,
    normaliser: float,
    batch: Batch,
    every_row: Sequence[Trajectory],
    scoring: Scoring,
    scale: float,
    reduces: Reduces,
    rollback: Rollback,
) -> tuple[Tensor | float, Metrics]:
    """Run a batch-scope loss: all trajectories are scored, on every rank, before the first backward.

    Every rank evaluates the loss on the rows of all ranks, and runs backward from its own predictions.

    Args:
        batch: this rank's rows.
        every_row: those of all ranks.
        scale: of the model's own loss.

    Returns:
        The loss and its metrics; 0 and none on all ranks but the first.
    """
    ranks, table = scoring.call.sharing.ranks, scoring.forward()
    entropies, values = (None if x is None else batch.at_rows(x) for x in (table.entropies, table.values))
    own: list[Any] = [batch.used, *batch.scores(batch.at_edges(table.logprobs), entropies)[:2], values]
    of_ranks: list[Any] = [own]
    if ranks.data_size > 1:
        on_host = [x.cpu() if isinstance(x, Tensor) else x for x in own]
        of_ranks = ranks.per_data_rank(ranks.exchange(on_host))
    used, *columns = zip(*of_ranks)
    # A rank without rows may have no values.
    present = [[x for x in column if x is not None] for column in columns]
    logprobs, entropies, values = (torch.cat(x).to(table.device) if x else None for x in present)
    assert logprobs is not None
    everything = np.arange(len(logprobs))
    rows = batch.rows if ranks.data_size == 1 else every_row
    selection = Selection(rows=rows, used=np.concatenate(used), edges=everything, edge_rows=everything)
    total, sums, gradients = evaluate_gradients(loss, normaliser, selection, logprobs, entropies, values)
    ranks.exchange(None)  # the loss may fail on one rank; the others would wait for it in the first backward
    before = sum(len(one[1]) for one in of_ranks[: ranks.data_rank])
    edges, entropy, value = (None if x is None else x[before : before + len(batch.edge_rows)] for x in gradients)
    scoring.backward(
        *batch.pull_back(table, edges, entropy),
        None if table.values is None or value is None else sum_by_place(table.values, batch.edge_rows, value),
        scale,
        reduces,
        rollback,
    )
    return (total, sums) if ranks.data_rank == 0 else (0.0, {})


class States(NamedTuple):
    """States whose values are scored; there are no predictions."""

    rows: Int64[np.ndarray, " T"]
    """Rows of the layout."""
    lengths: list[int] | None
    """Number of states of each trajectory; None: one, whose value is the reward."""


class Scored:
    """Scores of a batch, to compute a loss from; made by `TreeEngine.score`.

    Autograd ends in them. Call ``backward`` on a loss that is computed from them, then `backward` here. Until then
    ``.grad`` of the parameters is a `DeferredGradient`: an optimizer that steps, or code that reads it, gets an error.
    """

    logprobs: tuple[Tensor, ...]
    """K tensors [L_k - 1], in nats: entry t is the log-probability of token t + 1 of a trajectory."""
    entropies: tuple[Tensor, ...] | None
    """K tensors [L_k - 1], in nats: entropy of the distribution of token t + 1; None if not asked for."""
    id_logprobs: tuple[Tensor, ...] | None
    """K tensors [n_k], in nats: log-probabilities of all ids that were asked for, one prediction's after the other's;
    None if there are none."""
    values: tuple[Tensor, ...] | None
    """K tensors [L_k - 1] or [L_k - 1, c]: value of the state before token t + 1; None if not asked for."""
    rewards: Float[Tensor, " K *c"] | None
    """A reward model's value of every trajectory; None if not asked for."""
    is_top1: tuple[Tensor, ...] | None
    """K tensors bool [L_k - 1]: whether token t + 1 is the most likely one; None without statistics."""
    mean_logits: tuple[Tensor, ...] | None
    """K tensors [L_k - 1]: mean logit over the vocabulary, divided by the temperature; None without statistics."""
    log_sum_sq_probs: tuple[Tensor, ...] | None
    """K tensors [L_k - 1]: log of the sum of squared probabilities; None without statistics."""
    aux_loss: Tensor | None
    """The model's own auxiliary loss over all tokens of all trajectories, before its coefficient; None for a model
    whose configuration does not ask for one."""
    flat_tokens: int
    """Tokens summed over the trajectories."""
    unique_tokens: int
    """Tokens of the tree."""
    computed_tokens: int
    """Tokens that went through the model: those of the tree that some wanted prediction depends on."""

    def __init__(self, name: str, scoring: Scoring, tree: TokenTree, reads: Batch | States, *, values: bool):
        """Run the forward, and make the leaves.

        Args:
            name: the call, for messages.
            reads: the predictions or states of the tree that are scored.
            values: whether predictions have values.
        """
        self._name, self._scoring, self._reads, self._spent = name, scoring, reads, False
        self.live, call = scoring.live, scoring.call
        self.model = (
            ScoredModel(call.prepared) if self.live else None
        )  # before the forward: what it changes is left out
        """The model as it is now; None under ``torch.no_grad``."""
        table = scoring.forward()
        if self.model is not None:
            self.model.leave_out_changes()
        self.logprobs = ()
        self.entropies = self.id_logprobs = self.values = self.rewards = None
        self.is_top1 = self.mean_logits = self.log_sum_sq_probs = None
        self.flat_tokens, self.unique_tokens = tree.num_flat_tokens, tree.num_tokens
        self.computed_tokens = scoring.layout.num_tokens

        self.deferral = Deferral(name, call.prepared.parameters if self.live else ())
        self._leaves: dict[str, tuple[Tensor, ...]] = {}

        def leaves(kind: str, scores: Iterable[Tensor]) -> tuple[Tensor, ...]:
            self._leaves[kind] = tuple(x.detach().clone().requires_grad_(self.live) for x in scores)
            if not self.live or not self._leaves[kind]:
                return self._leaves[kind]
            return self.deferral.watch(self._leaves[kind], refuse=call.sharing.ranks.alone)

        self.aux_loss = None
        if scoring.added_loss is not None and scoring.added_loss.adds:
            (self.aux_loss,) = leaves("aux_loss", [scoring.added_loss.loss.to(table.logprobs.dtype)])
        if isinstance(reads, States):
            of_states = table.values_or_zeros[on_device(reads.rows, table.device)]
            if reads.lengths is None:
                (self.rewards,) = leaves("values", [of_states])
            else:
                self.values = leaves("values", of_states.split(reads.lengths))
            return

        rows = reads.per_trajectory
        of_rows = None if table.entropies is None else reads.at_rows(table.entropies)
        logprobs, of_rows, of_ids = reads.scores(reads.at_edges(table.logprobs), of_rows)
        self.logprobs = leaves("logprobs", rows(logprobs))
        if of_rows is not None:
            self.entropies = leaves("entropies", rows(of_rows))
        if of_ids is not None:
            every = tree.id_sets["asked"].select(reads.predicted)
            self._computed_ids = on_device(every.entries(np.flatnonzero(reads.used)), table.device)
            flat = of_ids.new_zeros(len(every.ids)).index_copy(0, self._computed_ids, of_ids)
            self.id_logprobs = leaves("id_logprobs", flat.split(np.diff(every.starts[reads.offsets]).tolist()))
        if values:
            self.values = leaves("values", rows(reads.at_rows(table.values_or_zeros)))
        if table.statistics is not None:
            self.is_top1 = tuple(rows(reads.at_edges(table.statistics.is_top1)[: len(reads.edge_rows)]))
            self.mean_logits = tuple(rows(reads.at_rows(table.statistics.mean_logits)))
            self.log_sum_sq_probs = tuple(rows(reads.at_rows(table.statistics.log_sum_sq_probs)))

    @property
    def plan(self) -> Plan:
        """The plan of the parts. If its ``scores_first`` is "kept", its ``kept`` says whose graphs stay."""
        return self._scoring.plan

    @property
    def recomputed_tokens(self) -> int:
        """Tokens run forward without graph so far."""
        return self._scoring.tokens_without_graph

    @property
    def parts(self) -> int:
        return self._scoring.plan.num_parts

    @property
    def runs_again(self) -> bool:
        """Whether parts or checkpointed layers run forward again in `backward`."""
        plan = self._scoring.plan
        return plan.scores_first != "kept" or not plan.kept.all() or is_checkpointed(self._scoring.call.model)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the model that scored, and of its value head."""
        return self._scoring.call.prepared.parameters

    @property
    def leaves(self) -> list[Tensor]:
        """All tensors that a loss may be computed from: log-probabilities, entropies, values or rewards, loss."""
        kinds = "logprobs", "entropies", "id_logprobs", "values", "aux_loss"
        return [leaf for kind in kinds for leaf in self._leaves.get(kind, ())]

    @property
    def model_has_changed(self) -> bool:
        """Whether weights, buffers, adapters or settings are others than when it scored."""
        try:
            if self.model is not None:
                self.model.check(self._name, runs_again=self.runs_again)
        except RuntimeError:
            return True
        return False

    def drop_gradients(self) -> None:
        self.deferral.forget()

    def zero_gradients(self) -> None:
        """Give the leaves gradients of zero, so that this rank runs `backward` with others whose leaves have some."""
        self.drop_gradients()
        for leaf in self.leaves:
            leaf.grad = torch.zeros_like(leaf)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"what {self._name} gave cannot be copied or pickled: it holds graphs of the model and runs backward once. "
            "Score the rows again; numbers to keep: [row.detach().clone() for row in scored.logprobs]"
        )

    def backward(self, *, sync: bool = True) -> None:
        """Run the leaves' gradients backward through the tree, and add to the parameters' ``.grad``.

        Args:
            sync: with several ranks, average gradients over them, as `DistributedDataParallel`
                does. False leaves them local; pass it in every call of an accumulation except the last.

        Raises:
            RuntimeError: a second call; weights changed since `score`, or, where parts run again, also buffers,
                adapters, settings, hooks, forwards or classes; no leaf has a gradient, or ``zero_grad`` has dropped
                them; `score` ran under ``torch.no_grad``; memory ran out while ``.grad`` held gradients of earlier
                calls.
            RanksDisagree: another rank failed, or has another `sync`.
        """
        parameters, sharing = self.parameters, self._scoring.call.sharing
        ranks = sharing.ranks if sync else sharing.passes_with
        # Parts that run again need a graph, whatever surrounds this call.
        with torch.inference_mode(False), torch.enable_grad(), ranks.together("Scored.backward"):
            gradients = self._gradients()
            ranks.same({"sync": sync})  # every rank has checked its own before any of them starts
            with (
                gradients_aside(self.deferral.set_anew()),
                self.deferral.lifted(),
                Rollback(parameters, sharing) as rollback,
            ):
                self._spent = True  # whatever happens: graphs are freed on the way
                try:
                    self._scoring.backward(*gradients, "each" if sync else "never", rollback)
                except RuntimeError as error:
                    if "through the graph a second time" not in str(error):
                        raise
                    raise RuntimeError(
                        f"a backward has gone through the graphs of {self._name}'s tree before its own: something "
                        "within the model, such as a forward hook that keeps activations for a penalty, is part of the "
                        "loss. On a tree it has the tokens of the tree, not those of rows, and no gradient: leave it "
                        "out, or train without shared prefixes"
                    ) from error
                ranks.exchange(None)  # all of them roll back if one has failed
        if sync:
            sharing.average_gradients(parameters)

    def _check_backward(self) -> None:
        name = self._name
        if self.model is None:
            raise RuntimeError(
                f"{name} ran under torch.no_grad (or nothing is trained): there is no graph to go through"
            )
        if self._spent:
            raise RuntimeError(f"a second backward through {name}: its graph is freed by the first; call it again")
        self.model.check(name, runs_again=self.runs_again)
        if self.deferral.dropped:
            raise RuntimeError(
                "the gradients that had arrived in what TreeEngine.score gave have been dropped (zero_grad?): call "
                "zero_grad() before the loss's backward"
            )
        # A rank without rows has the routers' auxiliary loss alone, which its loss may leave out.
        of_rows = any(x.numel() for kind, leaves in self._leaves.items() if kind != "aux_loss" for x in leaves)
        if of_rows and all(x.grad is None for x in self.leaves):
            raise RuntimeError(
                "no gradient has arrived in what TreeEngine.score gave: call backward on a loss that is computed from "
                "it first"
            )

    def _gradients(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | float]:
        """The leaves' gradients, by edge and row of the layout, and that of the auxiliary loss."""
        self._check_backward()
        table, reads = self._scoring.table, self._reads

        def grads(kind: str, like: Tensor | None) -> Tensor | None:
            leaves = self._leaves.get(kind)
            if like is None or leaves is None:
                return None
            given = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
            flat = torch.cat([like.new_zeros(0, *like.shape[1:]), *(g.to(like.dtype) for g in given)])
            if kind == "id_logprobs":
                flat = flat.index_select(0, self._computed_ids)
            elif isinstance(reads, Batch):
                flat = flat.index_select(0, on_device(np.flatnonzero(reads.used), table.device))
            return flat

        values = grads("values", table.values)
        places = reads.rows if isinstance(reads, States) else reads.edge_rows
        values = None if table.values is None or values is None else sum_by_place(table.values, places, values)

        (aux_loss,) = self._leaves.get("aux_loss", (None,))
        aux = 0.0 if aux_loss is None or aux_loss.grad is None else aux_loss.grad
        if isinstance(reads, States):
            return torch.zeros_like(table.logprobs), None, values, aux
        logprobs = grads("logprobs", table.logprobs)
        assert logprobs is not None
        of_ids = grads("id_logprobs", table.logprobs)
        return *reads.pull_back(table, logprobs, grads("entropies", table.entropies), of_ids), values, aux
