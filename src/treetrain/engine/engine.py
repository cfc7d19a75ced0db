"""The engine: gradients of any loss over branching trajectories; every shared prefix is computed once."""

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
        model: a causal LM, plain or wrapped by peft; no call changes anything of it but ``.grad``.
        budget: an int bounds the tokens whose graph is alive at once; any tree fits any int. A string such as "8GiB"
            bounds the peak memory above model, gradients and optimiser state. None takes what the device has free.
        temperature: divides the logits before the softmax.
        value_head: maps the inputs of a causal LM's head, [n, hidden], to values [n] (or [n, c]),
            for losses that need values. A model for token or sequence classification has its own head, and no
            log-probabilities.
        group: a torch.distributed group whose processes share each step, with the same model and their own rows (or
            none). Loss, metrics and gradients are those of all rows together. None: the ranks of a model in FSDP2
            (`fully_shard`) or `DistributedDataParallel`; with a plain model, this process alone.
        reduce: when FSDP2 reduces gradients. "part": after every part. "step": once per step; they are unsharded until
            then. "auto": once per step if there is ample memory for that.

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
            loss: called with log-probabilities [L - 1], entropies and a trajectory; returns an unnormalised sum and
                metrics. If its ``needs`` list "predicted_values", it also gets ``values``, [L - 1]. For losses of this
                library, only predictions with a loss weight are computed; a loss of your own gets every row and every
                prediction.
            normaliser: divides the sum; when accumulating over calls, pass that of the whole step. None takes
                ``loss.normaliser``.
            balance: the routers' balance over the whole step: the sum of `router_balance` over its calls. None treats
                each call as a step. If the model's configuration asks for the routers' auxiliary loss
                (``output_router_logits`` and ``router_aux_loss_coef``), that loss is over all tokens of all rows.
            sync: with several ranks, False leaves gradients local (sharded ones unreduced); pass it in all calls of a
                step but the last.
            mask: K rows [L_k - 1], bools or weights: predictions whose entry is 0 are not computed; a loss of your own
                sees 0 there. None: those with a loss weight for losses of this library, else all.

        Returns:
            loss, metrics and counts of the rows of all ranks. A single process on a GPU returns when the work is
            queued, so it can prepare the next batch meanwhile; reading loss or metrics waits.

        Raises:
            RanksDisagree: another rank failed, or its settings differ.
            DataError: an id outside the vocabulary, a row longer than the model's positions, nothing to train,
                a fact that the loss needs and a row lacks.
            ValueError: no parameter to train, gradients switched off, a normaliser that is not above 0, bytes that no
                plan fits into.
            TypeError: the loss cannot be called as one, or does not return a scalar and metrics.
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
        """How the routers spread these rows over the experts, without gradient. Add up the results of a step's calls.

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
        """Run the batch as a tree and return leaf tensors, one per row, for any loss.

        Call ``backward`` on a loss computed from the leaves, then ``backward`` on the result. If the graphs of all
        parts fit into the budget, they are kept in between; else the parts run again (see ``.plan``). Under
        ``torch.no_grad`` nothing is kept. Under FSDP2 every rank must make the call, even without rows.

        Args:
            rows: K lists, arrays or tensors of token ids, trajectories, or a tree.
            entropies: also give the entropies of the distributions that tokens were drawn from.
            values: also give the value of the state before each token (see ``value_head``).
            rewards: give a reward model's value of every row, and nothing else.
            statistics: also give statistics for logs, without gradient: is_top1, mean_logits, log_sum_sq_probs.
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
