"""`treetrain.TreeEngine`: the engine of `core/` with everything that stands beside it."""

import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch.distributed as dist
from torch import nn

from treetrain.core.engine import engine as core
from treetrain.core.engine.engine_model import Call, Sharing, StepBalance
from treetrain.core.engine.executor import Executor
from treetrain.core.engine.loss_gradients import Mask
from treetrain.core.errors import UnsupportedModel
from treetrain.core.hf.tree_mode import instance_of
from treetrain.core.losses.protocol import LossProtocol, StepResult
from treetrain.core.planning.make import Bytes
from treetrain.core.planning.plan import Plan
from treetrain.core.tree import trajectory
from treetrain.core.tree.layout import pack
from treetrain.core.tree.token_tree import Row, TokenTree
from treetrain.kernels.compiled import CompiledFeature
from treetrain.layers.experts.routers import experts_of
from treetrain.layers.trajectory import Trajectory
from treetrain.registry import make_registry

if TYPE_CHECKING:
    from treetrain.core.engine.score import Scored
    from treetrain.distill import Divergence
    from treetrain.layers.experts.experts import RouterBalance

F = TypeVar("F", bound=Callable[..., None])
_SAME = nn.Identity()
"""The value head whose values are the head's inputs; one for all engines, so that a model's first use comes once."""


def unknown_named(init: F) -> F:
    """An ``__init__`` whose error for an unknown argument names those that there are."""
    known = [*inspect.signature(init).parameters][1:]

    @functools.wraps(init)
    def checked(self: object, *args: object, **options: object) -> None:
        for name in options.keys() - set(known):
            near = "".join(f" (did you mean {x}?)" for x in difflib.get_close_matches(name, known, n=1))
            raise TypeError(f"{type(self).__name__} has no argument {name!r}{near}; it has {', '.join(known)}")
        init(self, *args, **options)

    return cast("F", checked)


def loaded(model: object) -> nn.Module:
    """The model; raises TypeError for a name, a configuration, or anything else that is no module."""
    if isinstance(model, nn.Module):
        return model
    given = f"the name {model!r}" if isinstance(model, str) else f"a {type(model).__name__}"
    raise TypeError(
        f"model is {given}; give a loaded model: tt.load_model(name), or AutoModelForCausalLM.from_pretrained(name)"
    )


class TreeEngine(core.TreeEngine):
    """Runs batches of trajectories on a Hugging Face causal LM as prefix trees.

    Args:
        model: a causal LM, plain or wrapped by peft; calls change only its ``.grad``.
        budget: an int bounds the tokens whose graph is alive at once; any tree runs at any int. A string such as "8GiB"
            bounds the peak memory above model, gradients and optimiser state. None takes what the device has free.
        temperature: divides the logits before the softmax.
        value_head: maps the inputs of a causal LM's head, [n, hidden], to values [n] (or [n, c]),
            for losses that need values. A model for token or sequence classification has its own head, and no
            log-probabilities.
        group: a torch.distributed group whose processes share each step, with the same model and their own rows (or
            none). Loss, metrics and gradients are those of all rows together. None: the ranks of a model in FSDP2
            (`fully_shard`) or `DistributedDataParallel`; with a plain model, this process alone.
        context: a group whose processes all pass the same rows, and divide the tokens of every part among them (context
            parallel; see docs/distributed.md). ``budget`` applies to each process. The processes that share a step
            include every context group as a whole.
        compile_layers: run decoder layers compiled (`torch.compile`), except attention, routers and recurrences. This
            takes a minute in the first step. None: on a GPU, unless in FSDP2 or tensor parallel.
        check: at the first use of the model, and again when its classes, forwards, hooks or adapters have changed,
            compare a forest of a few dozen tokens with its rows one by one in the plain model. Hooks see these calls.
            False does not compare. Models that processes divide (FSDP2, ZeRO-3, tensor and context parallel) are not
            compared: `share_prefixes` does so in its first step, `verify` before the model is divided.

    Raises:
        UnsupportedModel: the model, its value head or a setting would not be exact on a tree.
        ValueError: a temperature that is not above 0, or a budget that is neither tokens nor bytes.
    """

    @unknown_named
    def __init__(
        self,
        model: nn.Module,
        *,
        budget: int | str | Bytes | None = None,
        temperature: float = 1.0,
        value_head: nn.Module | None = None,
        group: "dist.ProcessGroup | None" = None,
        context: "dist.ProcessGroup | None" = None,
        compile_layers: bool | None = None,
        check: bool = True,
    ):
        model, sharing = loaded(model), Sharing()
        if dist.is_available() and dist.is_initialized():
            from treetrain.parallel.sharing import shared

            model, value_head, sharing = shared(model, value_head, group, context)
        if compile_layers and not sharing.may_compile:
            raise UnsupportedModel(
                "compile_layers=True with a model in FSDP2 or tensor parallel, whose layers communicate by hooks, has "
                "not been verified: leave it out"
            )
        super().__init__(
            model,
            budget=budget,
            temperature=temperature,
            value_head=value_head,
            sharing=sharing,
            registry=make_registry(compile_layers),
        )
        self.check = check
        """Whether the model is compared with its rows one by one at first use."""
        self._compile_layers = compile_layers
        self.accepted: dict[object, object] = {}
        """The states of the model that were compared last, by mode; see `check/first_use.py`."""

    def warm_up(self, plan: Plan | None = None) -> float:
        """Compile layers for the steps of a run before the first of them, in the dtype and autocast of the call.

        Nothing happens if layers do not run compiled, or if the model adds a loss of its routers. Gradients, hooks and
        buffers do not see these passes. Under context parallel every rank makes the call.

        Args:
            plan: the plan of a step, as from `plan`. None compiles for passes with and without gradient; parts of one
                token, which are compiled for separately, only come with a plan that has them.

        Returns:
            seconds.

        Raises:
            UnsupportedModel: the model would not be exact on a tree.
        """
        compiled = instance_of(CompiledFeature, self.prepared.registry.features)
        with self.sharing.passes_with.together("warm_up"):
            call = self.prepared.call()
            return 0.0 if compiled is None else compiled.warm_up(call, self.passes_type, plan)

    def router_balance(self, trajectories: Sequence[Trajectory] | TokenTree) -> "RouterBalance":
        """How the routers spread these rows over the experts, without gradient. The results of a step's calls add up.

        Raises:
            ValueError: a model without experts.
        """
        from treetrain.layers.experts.experts import Experts

        ranks = self.ranks
        with ranks.together("router_balance"):
            call = self.prepared.call()
            tree = self.tree_of(trajectories)
            self._before_plan(call, tree)
            if experts_of(call.capabilities) is None:
                raise ValueError(f"{type(self.model).__name__} has no experts, so there is no balance between them")
            layout = pack(tree, trim=False)
            call.free = self.sharing.agree_on_plan(ranks, layout, call.free)
            plan = self.plan_of(call, layout)
            ranks.exchange(None)  # all ranks have a plan, or none runs a pass
            for attempt in call.tries(plan):
                with attempt:
                    extensions = call.extensions(tree, balanced=True)
                    passes = self.passes_type(call, extensions, attempt.counts, None)
                    Executor(attempt.plan, passes, gradients=False).score()
            own = next(x for x in extensions if isinstance(x, Experts)).balance.to("cpu")
            balances = ranks.per_data_rank(ranks.exchange(own))
        return functools.reduce(operator.add, balances).to(call.device)

    def forward_backward(
        self,
        trajectories: Sequence[trajectory.Trajectory] | TokenTree,
        loss: LossProtocol | Callable[..., object],
        normaliser: float | None = None,
        balance: StepBalance | None = None,
        *,
        sync: bool = True,
        mask: Mask | None = None,
        adapter_names: Sequence[str] | None = None,
    ) -> StepResult:
        """Accumulate d loss / d parameters into ``.grad``, exactly as if every row were trained by itself.

        Args:
            loss: called with log-probabilities [L - 1], entropies and a trajectory; returns an unnormalised sum and
                metrics. If its ``needs`` list "predicted_values", it also gets ``values``, [L - 1]. For losses of this
                library, only predictions with a loss weight are computed; a loss of your own gets every row and every
                prediction.
            normaliser: divides the sum; when accumulating over calls, pass that of the whole step. None takes
                ``loss.normaliser``.
            balance: of the routers in the whole step, for their auxiliary loss: the sum of `router_balance` over its
                calls. None: this call is a step.
            sync: with several ranks, False leaves gradients local (sharded ones unreduced); pass it in all calls of a
                step but the last.
            mask: K rows [L_k - 1], bools or weights: predictions whose entry is 0 are not computed; a loss of your own
                sees 0 there. None computes those with a loss weight for losses of this library, and all for your own.
            adapter_names: for each row the adapter of a `peft.PeftModel` that it trains, or "__base__" for none. Rows
                of one adapter share prefixes, each adapter gets the gradients of its own rows, and one normaliser
                divides all. None: the active adapter.

        Returns:
            loss, metrics and counts of the rows of all ranks. A single process on a GPU returns when the work is
            queued, so it can prepare the next batch meanwhile; reading loss or metrics waits.

        Raises:
            RanksDisagree: another rank failed, or its settings differ.
            DataError: an id outside the vocabulary, a row longer than the model's positions, nothing to train,
                a fact that the loss needs and a row lacks, an adapter that the model does not have.
            ValueError: no parameter to train, gradients switched off, a normaliser that is not above 0, bytes that no
                plan fits into; rows of a frozen adapter.
            TypeError: the loss cannot be called as one, or does not return a scalar and metrics.
            UnsupportedModel: see the class.
            RuntimeError: memory ran out in a backward while ``.grad`` held gradients of earlier calls.
        """
        if adapter_names is None:
            return super().forward_backward(trajectories, loss, normaliser, balance, sync=sync, mask=mask)
        from treetrain import adapters

        rows = trajectories.trajectories if isinstance(trajectories, TokenTree) else trajectories
        return adapters.forward_backward(self, rows, loss, normaliser, adapter_names, sync=sync, mask=mask)

    def score(
        self,
        rows: Sequence[Row] | TokenTree,
        *,
        entropies: bool = False,
        values: bool = False,
        rewards: bool = False,
        statistics: bool = False,
        mask: Mask | None = None,
        ids: Sequence[object] | None = None,
        images: Sequence[Mapping[str, object] | None] | None = None,
        adapter_names: Sequence[str] | None = None,
    ) -> "Scored":
        """Run the batch as a tree and return leaf tensors, one per row, for any loss.

        Call ``backward`` on a loss computed from the leaves, then ``backward`` on the result. The graphs that fit into
        the budget are kept in between; the other parts run again (``.plan`` says which). Under ``torch.no_grad``
        nothing is kept. Under FSDP2 every rank must make the call, even without rows.

        Args:
            rows: K lists, arrays or tensors of token ids, trajectories, or a tree.
            entropies: also give the entropies of the distributions that tokens were drawn from.
            values: also give the value of the state before each token (see ``value_head``).
            rewards: give a reward model's value of every row, and nothing else.
            statistics: also give statistics for logs, without gradient: is_top1, mean_logits, log_sum_sq_probs.
            mask: K rows [L_k - 1], bools or weights: predictions whose entry is 0 are not computed; they hold 0 and get
                no gradient. None computes all.
            ids: for each row further ids of every prediction, whose log-probabilities `Scored.id_logprobs` has: L_k - 1
                lists, None for none, or an array [L_k - 1, k] filled up with -1. None for a row asks for none. The log
                of a set's share of the whole is the ``logsumexp`` of its log-probabilities.
            images: for each row the ``images`` of `Trajectory`, or None.
            adapter_names: for each row the adapter that it goes through; see `forward_backward`.

        Raises:
            DataError: an id outside the vocabulary, a row longer than the model's positions, a mask of another shape,
                ids that are no such lists, images that do not fit their rows, an adapter that the model does not have.
            UnsupportedModel: see the class; values or rewards of a model that has no head for them.
        """
        given: dict[str, Any] = {"entropies": entropies, "values": values, "statistics": statistics}
        given |= {"mask": mask, "ids": ids}
        if adapter_names is None:
            if images is not None:
                from treetrain.layers.images.encoders import with_images

                rows = with_images(self.model, rows, images)
            return super().score(rows, rewards=rewards, **given)
        from treetrain.adapters import ScoredAdapters

        if rewards or images is not None:
            raise UnsupportedModel("adapter_names with rewards=True or images= has not been verified; leave one out")
        rows = rows.trajectories if isinstance(rows, TokenTree) else rows
        return ScoredAdapters(self, rows, adapter_names, given)

    # ---- distillation

    def teach(self, rows: Sequence[Row] | TokenTree, k: int) -> list[Trajectory]:
        """The rows with `teacher_topk`, the k ids that this model finds most likely; for `losses.distill_topk`.

        Every trained prediction gets them, without gradient and at this engine's temperature. Every process gets its
        own rows; under FSDP2 every rank must make the call, even without rows.

        Raises:
            ValueError: k is no number of ids of the vocabulary.
            DataError: rows that the model cannot read, or with sampling masks.
            UnsupportedModel: see the class; tensor or context parallel, ZeRO-3.
        """
        from treetrain.distill import teach

        return teach(self, self._of_states, rows, k)

    def distill(
        self,
        rows: Sequence[Row] | TokenTree,
        teacher: "TreeEngine",
        divergence: "Divergence" = "forward",
        normaliser: float | None = None,
    ) -> StepResult:
        """Accumulate the gradients of a divergence from a teacher over the whole vocabulary, both on the rows' tree.

        The logits of a few states are in memory at a time, beyond a budget in bytes. Each model has its own engine's
        temperature. Processes that share the student's steps each give their own rows, or none, and have the gradients
        of all of them.

        Args:
            rows: their loss weights weight the divergence of each trained prediction.
            teacher: an engine of a model with the same vocabulary; it gets no gradient.
            divergence: "forward" is KL(teacher, student), "reverse" KL(student, teacher), "jensen_shannon" the mean of
                both to the mean distribution.
            normaliser: divides the sum; None takes the sum of the loss weights, of all processes.

        Raises:
            DataError: rows that the models cannot read, with sampling masks, or without anything trained.
            ValueError: a divergence that is none of these, nothing that can be trained.
            RanksDisagree: another rank failed, or its settings differ.
            UnsupportedModel: see the class; vocabularies of two sizes, routers with an auxiliary loss, tensor or
                context parallel, ZeRO-3, a teacher divided over other processes than share the student's steps.
        """
        from treetrain.distill import distill

        return distill(self, self._of_states, teacher, teacher._of_states, rows, divergence, normaliser)

    @functools.cached_property
    def _of_states(self) -> "TreeEngine":
        """An engine of the same model whose values are the inputs of its head."""
        options: Any = {"compile_layers": self._compile_layers, "check": self.check, "group": self.ranks.group}
        return TreeEngine(self.model, budget=self.budget, value_head=_SAME, **options)

    def _balance_of(self, tree: TokenTree) -> "RouterBalance":
        return self.router_balance(tree)

    def _compare_first_use(self, call: Call, tree: TokenTree) -> None:
        """Compare the model, in a state of classes, forwards and hooks that is new, with its rows one by one."""
        if self.check and tree.num_tokens:
            from treetrain.check.first_use import compare_first_use

            compare_first_use(self, call, tree)
