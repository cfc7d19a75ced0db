"""The engine: gradients of any loss over branching trajectories, every shared prefix computed once."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from treetrain.data.trajectory import Trajectory
from treetrain.engine.batch import Batch, check_batch, predictions_of, rewards_layout
from treetrain.engine.loss import Loss
from treetrain.engine.out_of_memory import PassCounts
from treetrain.engine.packed import model_device
from treetrain.engine.results import StepResult, summed
from treetrain.engine.routing import RouterBalance, Routing
from treetrain.engine.runtime import Runtime
from treetrain.engine.score import LiveScoring, Scored
from treetrain.engine.step import plan_step, prepare_step, rows_instead, run_step
from treetrain.errors import RanksDisagree
from treetrain.planning.plan import Plan
from treetrain.tree.build import Row, as_tree
from treetrain.tree.layout import pack
from treetrain.tree.token_tree import TokenTree


class TreeEngine(Runtime):
    """Runs batches of trajectories on a Hugging Face causal LM as prefix trees.

    Args:
        model: a causal LM, plain or wrapped by peft; it is left as it was found after every call.
        budget: an int bounds the tokens whose graph is alive at once, a string such as "8GiB" the peak of memory above
            model, gradients and optimiser state; any tree fits any budget. None fits to what the device has free.
        temperature: divides the logits before the softmax.
        value_head: maps the hidden states that a causal LM hands to its head, [n, hidden], to values [n] (or [n, c]),
            for losses that need values. A model for token or sequence classification has its own head, and no
            log-probabilities.
        group: of torch.distributed: processes that share each step, each with rows of its own (or none) and the same
            model. Loss, metrics and gradients are those of all rows together. None: the ranks that a model in the hands
            of FSDP2 (`fully_shard`) or `DistributedDataParallel` is spread over; a plain model's process is alone.
        reduce: when FSDP2 reduces gradients: after every part, once per step (they are whole until then), or "auto":
            once where there is ample room for that.

    Raises:
        UnsupportedModel: the model, its value head or a setting would not be exact on a tree.
        ValueError: a temperature that is not above 0, or a budget that is neither tokens nor bytes.
    """

    def plan(self, trajectories: Sequence[Trajectory] | TokenTree) -> Plan:
        """The plan of a training step on these trajectories under the engine's budget."""
        tree = as_tree(trajectories, merge=self.merge)
        plan = self.plan_of(pack(tree, tree.trained_edges()[0] > 0, trim=not self.balanced))
        return (rows_instead(self, tree, plan) or (tree, plan))[1]

    def forward_backward(
        self,
        trajectories: Sequence[Trajectory] | TokenTree,
        loss: Loss | Callable[..., Any],
        normaliser: float | None = None,
        balance: RouterBalance | None = None,
        *,
        sync: bool = True,
        mask: Sequence[Any] | None = None,
    ) -> StepResult:
        """Accumulate d loss / d parameters into ``.grad``, exactly as if every row were trained by itself.

        Args:
            loss: called with log-probabilities [L - 1], entropies and a trajectory; returns an unnormalised sum
                and metrics; one whose ``needs`` list "predicted_values" is also given ``values``, [L - 1]. The losses
                of this library compute only what has a loss weight; a loss of your own gets every row and every
                prediction, whatever the weights.
            normaliser: what the sum is divided by; pass that of the whole step when accumulating over calls.
                None asks the loss.
            balance: of the routers over the whole step, the sum of `router_balance` over its calls; None takes each
                call for a step of its own. Where the model's configuration asks for an auxiliary loss of its routers
                (``output_router_logits`` and ``router_aux_loss_coef``), it is that of all tokens of all rows.
            sync: over several ranks: False leaves every rank its own gradients (sharded ones: unreduced), for all calls
                of a step but the last.
            mask: K rows [L_k - 1], bools or weights: predictions whose entry is 0 are not computed; a loss of your own
                sees 0 there. None: losses of this library compute what has a loss weight, others everything.

        Returns:
            loss, metrics and counts of the rows of all ranks. On a GPU without other ranks this returns when the work
            is queued, so that the next batch can be prepared meanwhile; reading loss or metrics waits for it.

        Raises:
            RanksDisagree: another rank makes another step, or could not make its own.
            DataError: an id outside the vocabulary, a row longer than the model's positions, nothing to train,
                a fact that the loss needs and a row lacks.
            ValueError: no parameter to train, gradients switched off, a normaliser that is not above 0.
            TypeError: the loss is no loss, or does not return a scalar and metrics.
            UnsupportedModel: see the class.
            RuntimeError: memory ran out in a backward while gradients of earlier calls lay in ``.grad``.
        """
        step = prepare_step(self, trajectories, loss, normaliser, mask)
        if self.balanced and balance is None and not self.ranks.alone:
            balance = self.router_balance(step.tree)
        step, plan, reduces = plan_step(self, step, sync=sync, balance=balance)
        rollback = self.rollback()

        def run() -> tuple[None, StepResult]:
            result = run_step(self, step, plan, reduces, balance, rollback)
            return None, result if self.ranks.alone else result.on_host()

        try:
            _, results = self.ranks.agree("the step", run)
        except RanksDisagree as error:
            rollback.undo(error)
            raise
        if sync:
            self.ranks.average_gradients(self.whole_parameters)
        return summed(results, over=len(results))

    def router_balance(self, trajectories: Sequence[Trajectory] | TokenTree) -> RouterBalance:
        """How the routers spread these rows over the experts, without gradient; calls of one step add up.

        Raises:
            ValueError: a model without experts.
        """

        def prepared() -> tuple[tuple[Routing, Plan], None]:
            self.capabilities = self.checked()
            tree = as_tree(trajectories, merge=self.merge)
            check_batch(tree, self.capabilities)
            routing = self.routing(tree, balanced=True)
            if routing is None:
                raise ValueError(f"{type(self.model).__name__} has no experts, so there is no balance between them")
            return (routing, self.plan_of(pack(tree, trim=False))), None

        (routing, plan), _ = self.ranks.agree("router_balance", prepared)

        def route(plan: Plan, counts: PassCounts) -> None:
            routing.begin()
            self.executor(plan, counts, routing, gradients=False).route()

        def balance() -> tuple[None, RouterBalance]:
            self.within_memory(plan, route)
            return None, routing.balance.to("cpu")

        _, balances = self.ranks.agree("counting choices", balance)
        return functools.reduce(operator.add, balances).to(model_device(self.model))

    def score(
        self,
        rows: Sequence[Row] | TokenTree,
        *,
        entropies: bool = False,
        values: bool = False,
        rewards: bool = False,
        statistics: bool = False,
        mask: Sequence[Any] | None = None,
    ) -> Scored:
        """Run the batch as a tree and hand out leaf tensors, one per row, for a loss of anybody's own.

        Call ``backward`` on a loss that is computed from the leaves, then ``backward`` on what this returns. Where the
        graphs of all parts fit into the budget they are kept in between; else the parts run again (``.plan`` says so).
        Under ``torch.no_grad`` nothing is kept. Under FSDP2 every rank must make the call, be it without rows.

        Args:
            rows: K lists, arrays or tensors of token ids, trajectories, or a tree.
            entropies: also give the entropies of the distributions that tokens were drawn from.
            values: also give the value of the state before each token (see ``value_head``).
            rewards: give what a reward model says of every row, and nothing else.
            statistics: also give what trainers log, without gradient: is_top1, mean_logits, log_sum_sq_probs.
            mask: K rows [L_k - 1], bools or weights: predictions whose entry is 0 are not computed; they hold 0 and get
                no gradient. None computes all.

        Raises:
            DataError: an id outside the vocabulary, a row longer than the model's positions, a mask of another shape.
            UnsupportedModel: see the class; values or rewards of a model that has no head for them.
        """

        def prepared() -> tuple[TokenTree, Any]:
            found = self.checked()
            logprobs = not rewards and (found.scores_tokens or not values)
            self.capabilities = found.asked(logprobs=logprobs, values=values or rewards)
            if self.live:
                self.check_hooks()
            tree = as_tree(rows, merge=self.merge)
            check_batch(tree, self.capabilities)
            if rewards:
                return tree, rewards_layout(tree, self.capabilities)
            predicted = predictions_of(tree, mask)
            batch = Batch.of(tree, weighted=False, every_token=self.balanced, mask=predicted)
            return tree, (batch.layout, batch)

        tree, (layout, batch) = self.together("score", prepared)
        balanced = self.balanced and not rewards
        scoring = LiveScoring(
            self,
            self.plan_of(layout),
            self.routing(tree, balanced=balanced),
            name="TreeEngine.score",
            entropy=entropies and not rewards,
            statistics=statistics and not rewards,
        )
        scoring.forward()
        return Scored(scoring, tree, batch, values=values, aux=balanced)

    def logprobs(
        self,
        trajectories: Sequence[Row] | TokenTree,
        *,
        return_entropy: bool = False,
        mask: Sequence[Any] | None = None,
    ) -> Any:
        """Log-probabilities of every token but the first of every row, without gradient, with training's numerics.

        Args:
            trajectories, mask: as `score`.

        Returns:
            K tensors [L_k - 1], in nats; with ``return_entropy`` a second list of K tensors of entropies.
        """
        with torch.no_grad():
            scored = self.score(trajectories, entropies=return_entropy, mask=mask)
        return (scored.logprobs, scored.entropies) if return_entropy else scored.logprobs
