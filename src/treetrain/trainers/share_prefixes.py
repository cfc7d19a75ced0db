"""One line that makes a transformers or TRL trainer compute shared prefixes once, with the trainer's own losses.

The trainers ask their model for the log-probabilities of a batch and compute the loss from them. Here the model's
forward answers these calls: it recovers the rows of the batch, scores them as a prefix tree (`TreeEngine.score`) and
returns leaves in the shape that the trainer expects (`outputs.py`). The trainer's own backward ends in the leaves, and
their gradients wait in ``.grad`` (`treetrain.core.engine.deferred`) until they run through the tree, once. That is at
the end of the last training step whose rows the tree holds, or when something needs the gradients earlier. No loss,
metric or schedule is copied. `patches.py` lists what is replaced, and how it is undone.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import Trainer

from treetrain.core.errors import DataError
from treetrain.core.hf.capability import causal_lm
from treetrain.core.hf.tree_mode import RUN_KEYWORD, replaced
from treetrain.core.planning.make import Bytes
from treetrain.engine import TreeEngine
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.once import Count, checked_count
from treetrain.parallel.process_group import limit_waits
from treetrain.trainers.batches import ADAPTERS, IGNORED, KEPT, RECORDED, ROUTED, ModelInputs, with_labels
from treetrain.trainers.calls import Asks, Call, agreed, by_name, refused_arguments, unknown_arguments
from treetrain.trainers.last_states import SharesLastStates, SharesLogits, reads_distributions, share_distributions
from treetrain.trainers.once import data_counted_once
from treetrain.trainers.outputs import Answer, Output, Question, TokensOutput, TreeOutput, kind_of_output
from treetrain.trainers.patches import OwnForward, TreeForward, before_steps, is_fused, weakly
from treetrain.trainers.processes import Processes
from treetrain.trainers.settings import check_trainer, columns_of_rows
from treetrain.trainers.sharded_processes import ShardedProcesses
from treetrain.trainers.step_scores import Ask, StepScores, TreeScores
from treetrain.trainers.zero_processes import ZeroProcesses

T = TypeVar("T", bound=Trainer)
PROCESSES = {"FSDP": ShardedProcesses, "DEEPSPEED": ZeroProcesses}
"""How processes hold weights, by accelerate's distributed type; otherwise each holds all of them."""


def share_prefixes(
    trainer: T,
    budget: int | str | Bytes | None = None,
    *,
    check: bool | Literal["rows"] = True,
    count: Count = "per trajectory",
) -> T:
    """Make a trainer compute every shared prefix of a batch once, in forward and backward, and return it.

    Losses, gradients, metrics and evaluation do not change, unless `count` asks for it. Rows of one optimizer step on
    one process share prefixes, across micro-batches; `PrefixGroupSampler` brings such rows together.

    Args:
        trainer: a `transformers.Trainer` with a causal LM, or one of TRL that takes rewards or log-probabilities of
            its fused head: `SFTTrainer`, `DPOTrainer`, `KTOTrainer`, `GRPOTrainer`, `RLOOTrainer`, `RewardTrainer`,
            `AsyncGRPOTrainer` and their subclasses, or `DistillationTrainer` or an experimental one of its kind
            (`GKDTrainer`, ...; in one process, rows of a micro-batch share); after construction and before ``train()``.
        budget: tokens whose graph is alive at once, or bytes ("8GiB") of peak memory above model, gradients and
            optimiser state; None uses the memory that is free.
        check: compare a few rows of the first training batch with the model's plain forward and backward, log the
            difference, and stop if it is too large. True runs the plain model on the batch as the trainer gives it;
            "rows" on each row by itself, where that batch changes its rows (padding that positions count, packed rows
            that see one another). False does not compare.
        count: "per trajectory" trains a token in every row whose labels have it. "once" trains it in the first of
            them in `train_dataset` only (within an `episode`, if the data have such a column), and the normaliser
            counts it once; for `SFTTrainer` and plain trainers whose loss is their own, or says ``sums_tokens = True``.

    Returns:
        the same object; its class is now a subclass of the one it had.

    Raises:
        UnsupportedModel: the model would not be exact on a tree.
        ValueError: a setting of the trainer that cannot be exact (the message says what to change), or a version of
            TRL whose trainers do not ask for log-probabilities in a known way.
        DataError: count="once", and two rows give one token different facts (advantages, log-probabilities, ...).
    """
    if check not in (True, False, "rows"):
        raise ValueError(f"check is {check!r}; give True, False or 'rows'")
    if isinstance(trainer, SharesPrefixes | SharesLastStates | SharesLogits):
        raise ValueError("this trainer shares prefixes already; call share_prefixes once")
    if not isinstance(trainer, Trainer):
        raise TypeError(f"share_prefixes takes a transformers.Trainer or a subclass, not a {type(trainer).__name__}")
    once = data_counted_once(trainer) if checked_count(count) == "once" else None
    if reads_distributions(trainer):
        return share_distributions(trainer, budget, check)
    sharing = PrefixSharing(trainer, budget, check)
    if once is not None:
        trainer.train_dataset = once
    plain = type(trainer)
    trainer.__class__ = type(plain.__name__, (SharesPrefixes, plain), {"__doc__": plain.__doc__})
    trainer.prefix_sharing = sharing  # type: ignore[attr-defined]
    return trainer


class SharePrefixesMixin:
    """Shared prefixes for subclasses of trainers: ``class MyTrainer(SharePrefixesMixin, DPOTrainer)``.

    Its ``__init__`` ends with `share_prefixes`, which works around the methods that the subclass overrides.

    Args:
        budget, check, count: see `share_prefixes`; all other arguments are the trainer's.
    """

    def __init__(
        self,
        *args: Any,
        budget: int | str | Bytes | None = None,
        check: bool | Literal["rows"] = True,
        count: Count = "per trajectory",
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        share_prefixes(self, budget, check=check, count=count)  # type: ignore[type-var]


class SharesPrefixes:
    """The methods that `share_prefixes` puts around those of a trainer."""

    prefix_sharing: "PrefixSharing"

    def train(self, *args: object, **kwargs: object) -> object:
        """Train as the trainer does. If another process has ended, the error says which."""
        limit_waits(self.args.ddp_timeout)  # type: ignore[attr-defined]
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        except RuntimeError as error:
            self.prefix_sharing.steps.all_ranks.explain(error)
            raise

    def get_batch_samples(self, *args: object, **kwargs: object) -> tuple[list, object]:
        """Get the micro-batches of the next optimizer step, which are scored as one tree if they share prefixes."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self.prefix_sharing.steps.begin_step(batches)
        return batches, num_items

    def _generate(self, *args: object, **kwargs: object) -> object:
        """Generate, and keep the experts and the sampling masks that a ``rollout_func`` has recorded."""
        generated = super()._generate(*args, **kwargs)  # type: ignore[misc]
        self.prefix_sharing.recorded = recorded_in(generated)
        return generated

    def _generate_and_score_completions(self, *args: object, **kwargs: object) -> dict[str, object]:
        """Generate and score; what was recorded goes with the rows into their micro-batches."""
        with replaced(self.prefix_sharing, recorded={}):
            output = super()._generate_and_score_completions(*args, **kwargs)  # type: ignore[misc]
            return output | self.prefix_sharing.recorded

    def _get_per_token_logps_and_entropies(
        self, *args: object, batch_size: int | None = None, **kwargs: object
    ) -> object:
        """Score all rows of GRPO or RLOO in one call: `batch_size` is ignored, since the budget bounds memory."""
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, model: nn.Module, *args: object, **kwargs: object) -> Tensor:
        """Run the trainer's training step, and the backward of the trees whose rows have all been trained."""
        with self.prefix_sharing.training_step(model):
            return super().training_step(model, *args, **kwargs)  # type: ignore[misc]

    def compute_loss(self, model: nn.Module, *args: object, **kwargs: object) -> object:
        """Compute the trainer's loss from the tree's scores."""
        batch = args[0] if args else kwargs.get("inputs")
        given = batch if isinstance(batch, dict) else {}
        recorded = {name: given[name] for name in RECORDED if given.get(name) is not None}
        missing = [name for name in self.prefix_sharing.columns if name not in given]
        if missing and self.prefix_sharing.steps.step.training:
            raise ValueError(
                f"train_dataset has a column {missing[0]}, and its batch has none: the data_collator drops it. Give "
                "one that puts it into the batch, or remove or rename the column"
            )
        with (
            self.prefix_sharing.loss_of(model) as inner,
            replaced(self.prefix_sharing, recorded=recorded, adapter_names=given.get(ADAPTERS)),
        ):
            return super().compute_loss(inner, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(
        self, model: nn.Module, inputs: object, prediction_loss_only: bool, *args: object, **kwargs: object
    ) -> object:
        """Run the trainer's evaluation; if logits are wanted, the model's own forward computes them."""
        with self.prefix_sharing.evaluation(logits=not prediction_loss_only):
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
        """Add overlap, counts and speed-ups since the last logs to the logs of training steps."""
        if "loss" in logs:
            logs.update(self.prefix_sharing.gains.take_logs())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class PrefixSharing:
    """Answers the calls of a trainer's models from trees.

    The state of an optimizer step is in ``steps.step``, which each step makes anew; here is what stays during a run.
    """

    def __init__(self, trainer: Trainer, budget: int | str | Bytes | None, check: bool | Literal["rows"]):
        from treetrain.trainers.gains import Gains
        from treetrain.trainers.relied_on import warn_if_untested

        assert trainer.model is not None
        self.model: nn.Module = trainer.model
        kind = kind_of_output(trainer)
        check_trainer(trainer)
        self.columns = columns_of_rows(trainer)
        """Columns of the training data that every batch must have; see there."""
        self.processes = PROCESSES.get(trainer.accelerator.distributed_type.value, Processes)(trainer)
        self.trainer, self.budget, self.check = trainer, budget, check
        self._compares_first_use = bool(check)
        """Whether engines compare a model at first use, where the comparison of the first step does not."""
        self._settle = weakly(self.settle)
        self.wrapped = self.model
        """The model as the trainer calls it, such as within DistributedDataParallel."""
        self.in_loss = False
        """Whether the trainer is in `compute_loss`, where calls with labels ask for scores."""
        self.reads_logits = False
        """Whether it reads the logits of the output that also has the loss, so that the plain forward gives both."""
        self.recorded: dict[str, Any] = {}
        """What was recorded for the rows that the trainer scores now, by the names in `RECORDED`."""
        self.adapter_names: Any = None
        """The adapter of each row of the batch whose loss is computed now; None if the batch names none."""
        self._settings_compared = False
        """Whether the settings of all ranks have been compared."""
        self._engines: dict[tuple[object, float], TreeEngine] = {}
        self.gains = Gains(trainer)
        # The checkpoints of `SafeCheckpointsMixin` keep the numbers on which the next logs depend.
        self.state_dict, self.load_state_dict = self.gains.state_dict, self.gains.load_state_dict
        models = [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
        models = [trainer.accelerator.unwrap_model(model) for model in models]
        self.outputs: dict[nn.Module, Output] = {model: kind.of(model) for model in models}
        """The kind of output that the trainer reads of each of its models."""
        self.output = self.outputs[models[0]]
        self.steps = StepScores(trainer, functools.partial(self.output.rows, model=self.model))
        for model, output in self.outputs.items():
            self._engine(model, output)  # raises before any forward is replaced
        for model in self.outputs:
            inner, name = causal_lm(model), self.processes.call
            if inner is not model and is_fused(inner.forward):  # beneath an adapter
                inner.forward = OwnForward(inner)
            setattr(model, name, TreeForward(self, model, name))
        for package in ("transformers",) if kind.has_loss else ("transformers", "trl"):
            warn_if_untested(package)
        if trainer.accelerator.num_processes > 1:
            before_steps(self._before_step)

    def _engine(self, model: nn.Module, output: Output) -> TreeEngine:
        """The engine for calls of a model, which may be wrapped for several processes."""
        key = (self.processes.engine_key(model), output.temperature)
        if key not in self._engines:
            training = model.training
            model.train()  # so that checks see active dropout
            try:
                self._engines[key] = TreeEngine(
                    model, budget=self.budget, temperature=output.temperature, check=self._compares_first_use
                )
            finally:
                model.train(training)
        return self._engines[key]

    def _engine_for(self, model: nn.Module, output: Output) -> TreeEngine:
        """The engine that answers a call of the model now: one that is trained is wrapped for several processes."""
        return self._engine(self.wrapped if model is self.model and _trains(model) else model, output)

    # ---- The trainer's methods run within these ----

    @contextmanager
    def training_step(self, model: nn.Module) -> Iterator[None]:
        """Inside the block, trees may hold rows of several micro-batches.

        After the last micro-batch all gradients run through their trees, since the trainer reads them next.
        """
        step = self.steps.step
        if step.training:  # a training step within another
            yield
            return
        self.wrapped = model
        if not self._settings_compared:
            sharing = self._engine(model, self.output).sharing
            settings = {"check": self.check, "the temperature and outputs of the trainer's scores": self.output}
            self.processes.compare(sharing.ranks, self.trainer, model, **settings)
            self.steps.ranks, self.steps.all_ranks = sharing.passes_with, sharing.ranks
            self._settings_compared = True
        self.processes.begin(model, self._settle)
        with step.micro_batch():
            try:
                yield
            except RuntimeError as error:
                if "through the graph a second time" in str(error):
                    error.add_note(
                        "share_prefixes: if a forward hook keeps activations for a penalty, the loss holds graphs of "
                        "the tree and of the first step's comparison, and no activations of rows: leave it out, or "
                        "train without share_prefixes"
                    )
                raise
        self.steps.drop_failed()
        last = self.trainer.accelerator.sync_gradients
        self.settle(everything=last, last=last)
        if last:
            step.end()
            self.gains.end_step()

    def settle(self, *, everything: bool = True, last: bool | None = None) -> None:
        """Run gradients that wait through their trees.

        Args:
            everything: also trees that hold rows of micro-batches to come, which are then scored again.
            last: gradients become those of all processes, unless they are already; None: if this is the last
                micro-batch.
        """
        last = bool(self.trainer.accelerator.sync_gradients) if last is None else last
        engine = self._engine(self.wrapped, self.output)
        for scored in self.processes.settle(engine, self.steps, everything=everything, last=last):
            self.gains.add_backward(scored)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Average what has not been averaged, such as the gradients of a rank that skipped its last micro-batch."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(p) in stepped for p in self.model.parameters()):
            return
        step = self.steps.step
        if self.steps.gradients_wait or not step.complete:
            self.settle(last=True)
        step.complete = False  # an optimizer that steps again has other gradients

    @contextmanager
    def loss_of(self, model: nn.Module) -> Iterator[nn.Module]:
        """Inside the block, calls of the yielded model are answered from the tree; `model` may be wrapped."""
        inner = self.trainer.accelerator.unwrap_model(model)
        if inner is not self.model:
            raise RuntimeError(
                "the trainer trains another model than it had when share_prefixes was called; call share_prefixes when "
                "the trainer has its last one"
            )
        self.wrapped = model
        with replaced(self, in_loss=True):
            yield inner

    @contextmanager
    def evaluation(self, *, logits: bool) -> Iterator[None]:
        """Inside the block, no micro-batch is trained.

        Args:
            logits: the trainer reads the logits of the output that also has its loss, so the plain forward gives both.
        """
        logits = logits and self.output.has_loss
        with replaced(self.steps.step, training=False), replaced(self, reads_logits=logits):
            yield

    # ---- The model's calls ----

    def answer(self, forward: TreeForward, args: tuple, kwargs: ModelInputs) -> object:
        """The result of a call of the model's forward: from a tree if it asks for scores, else its own."""
        model, plain, output = forward.module, forward.plain, self.outputs[forward.module]
        if self.in_loss and output.has_loss and args:
            args, kwargs = (), by_name(model, args, kwargs)
        if RUN_KEYWORD in kwargs:  # a pass of a tree
            return plain(*args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in RECORDED}
        follows = torch.is_grad_enabled() or callable(self.trainer.compute_loss_func)
        asks = output.asks(Call(args, kwargs, self.in_loss, self.reads_logits, follows))
        if asks is Asks.OUTPUT and not self.in_loss:
            return plain(*args, **kwargs)
        if self.reads_logits and self.recorded:
            raise ValueError(
                f"an evaluation that reads logits runs the plain model, which does not read {', '.join(self.recorded)} "
                "of the batch: set prediction_loss_only=True (or compute_metrics=None), or leave them out of its data"
            )
        names, question = kwargs.get(ADAPTERS), None
        unknown = unknown_arguments(model, {name: value for name, value in kwargs.items() if name != ADAPTERS})
        ranks = self._engine_for(model, output).sharing.passes_with
        with ranks.together("the model's call"):
            asks = agreed(ranks, asks, unknown=bool(unknown))
            if asks is Asks.SCORES:
                if unknown:
                    raise refused_arguments(unknown)
                inputs = with_labels(kwargs)
                if names is None and self.adapter_names is None:
                    rows = output.rows(inputs | self._recorded(model), self.model)
                    question = Question(forward, output, inputs, rows, shifted=inputs is not kwargs)
                elif names is None or not output.has_loss:
                    raise ValueError(
                        f"the batch has {ADAPTERS}, and {type(self.trainer).__name__} trains all of its rows through "
                        "the active adapter: leave them out, or take a plain Trainer, or a loss of your own on "
                        "tt.token_logprobs(model, inputs), both of which train each row's own"
                    )
        if question is None and asks is Asks.SCORES:
            return self._loss_of_adapters(forward, inputs)
        if question is not None:
            return self._from_tree(question)
        if asks is Asks.OUTPUT_OR_SCORES:
            return TreeOutput(forward, {name: value for name, value in kwargs.items() if name != "shift_labels"})
        if torch.is_grad_enabled() and not args:
            self.gains.add_call(kwargs)
        return plain(*args, **kwargs)

    def token_logprobs(
        self, forward: TreeForward, inputs: ModelInputs, temperature: float, *, entropy: bool, ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Answer `treetrain.token_logprobs` for a batch from a tree."""
        output = TokensOutput(temperature, entropy)
        ranks = self._engine_for(forward.module, output).sharing.passes_with
        with ranks.together("the model's call"):
            agreed(ranks, Asks.LOGPROBS if ids is None else Asks.LOGPROBS_AT_IDS)
            disabled = getattr(forward.module, "_adapters_disabled", False)  # for a reference without adapters
            names = None if disabled else inputs.get(ADAPTERS)
            recorded = {name: inputs[name] for name in RECORDED if name in inputs}
            inputs = {name: value for name, value in inputs.items() if name not in (*RECORDED, ADAPTERS)}
            rows = output.rows(inputs | self._recorded(forward.module, recorded), forward.module)
            question = Question(forward, output, inputs, rows if ids is None else rows.asking(ids))
        return self._from_tree(question) if names is None else self._of_adapters(question, names)

    def _recorded(self, model: nn.Module, given: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the records, or those `given` with a batch, for a call of a model; a reference routes freely."""
        adapter = getattr(model, "active_adapter", None)
        reference = model is not self.model or bool(getattr(model, "_adapters_disabled", False)) or adapter == "ref"
        return {
            name: value for name, value in (self.recorded | (given or {})).items() if not (reference and name == ROUTED)
        }

    def _loss_of_adapters(self, forward: TreeForward, inputs: ModelInputs) -> TreeOutput:
        """The output of a plain Trainer's model for rows that each name their adapter."""
        logprobs, _, _ = self.token_logprobs(forward, inputs, 1.0, entropy=False, ids=None)
        normaliser = inputs.get("num_items_in_batch")
        if normaliser is None:
            normaliser = (inputs["labels"][:, 1:] != IGNORED).sum()
        return TreeOutput(forward, inputs, -logprobs.sum() / normaliser)

    def _of_adapters(self, question: Question, names: Sequence[str]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Scores of a batch whose rows each name their adapter: a tree for each of these, which has its rows alone."""
        from treetrain.adapters import Groups

        model, rows = question.forward.module, question.rows
        groups = Groups(self._engine_for(model, question.output), len(rows.ids), names, trains=False)
        if _trains(model):
            groups.check_trained()
            self.settle(everything=False, last=False)  # before another adapter is active
        found: list[tuple[Tensor, ...]] = []
        for name, numbers in groups.rows.items():
            own = question._replace(rows=rows.only(numbers), within=functools.partial(groups.active, name))
            # The first step compares the rows of one adapter: ranks compare together, and may have other adapters.
            with nullcontext() if not found else replaced(self, check=False):
                found.append(self._from_tree(own))
        # Each has zeros in the places of the other adapters' rows.
        return tuple(None if one[0] is None else sum(one) for one in zip(*found))  # type: ignore[return-value]

    def _from_tree(self, question: Question) -> Any:
        """The output that the trainer gets for a call, from a tree."""
        model, output = question.forward.module, question.output
        engine = self._engine_for(model, output)
        with self.processes.autocast(), question.within(), output.balanced(model, question.inputs) as balanced:
            if self.check and _trains(model):
                self._check_first_step(question, engine, balanced=balanced)
            scores, own = self._scored(question, engine, balanced=balanced)
            assert scores.scored is not None
            keep = functools.partial(self.steps.keeping, scores)
            return output.answer(Answer(question, scores.scored, own, keep, engine.capabilities.auxiliary))

    def _scored(self, question: Question, engine: TreeEngine, *, balanced: bool) -> tuple[TreeScores, slice]:
        """The scores of a tree that holds the call's rows, and the slice of its rows that they are."""
        from treetrain.check.first_use import users_hooks

        model, output = question.forward.module, question.output
        training = _trains(model)
        # Hooks of parameters see the gradient of every micro-batch; those of shards see that of a step, or none.
        hooked = training and any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
        alone = balanced or (not engine.sharing.collective and (hooked or bool(users_hooks(model))))
        # The ids asked for of the next micro-batches, and their rows of one adapter, are not known.
        alone = alone or bool(question.rows.asked) or question.within is not nullcontext
        if training:
            self.settle(everything=False, last=False)  # several trees in a micro-batch would be alive at once
        ask = Ask.of(model, output, engine.prepared.device.type)
        scores, own = self.steps.scores_for(ask, question.rows, together=not alone)
        if scores.scored is None:
            scores.within = question.within
            started = self.gains.now() if training else 0.0
            scored = scores.score(engine, output.score)
            if training:
                self.processes.scored(scored, self._settle)
                self.gains.add(scored, scores.tree, engine.prepared.cost, started)
            if balanced and scored.aux_loss is None and scored.rewards is None:
                raise ValueError(
                    "the trainer asks for the routers' auxiliary loss, but router_aux_loss_coef of the model's "
                    "configuration is 0 or not known; set it to the trainer's own"
                )
        return scores, own

    # ---- The first step ----

    def _check_first_step(self, question: Question, engine: TreeEngine, *, balanced: bool) -> None:
        """Compare a few rows with the plain model; all ranks stop if one of them does. See `first_step`."""
        from treetrain.trainers import first_step

        forward, alone = question.forward, self.check == "rows"
        with (
            engine.ranks.together("the comparison in the first step"),
            replaced(self.steps, waiting=[]),
            self.processes.comparison(forward.module),
        ):
            unwrapped = self._engine(forward.module, question.output)
            sample, compares = first_step.sample(question, unwrapped, engine.sharing, alone=alone, balanced=balanced)
            if sample is not None:
                plain, trees = first_step.run(sample)
                self.gains.once, self.gains.plain_rate = first_step.judge(sample, plain, trees)
        if compares:
            self.check = False


def recorded_in(generated: object) -> dict[str, list[Any]]:
    """Read a GRPO ``rollout_func``'s records, by the names in `RECORDED`: for each row, from its prompt on.

    Args:
        generated: what the trainer's `_generate` returns: prompts, completions and, among others, a dict of the
            further fields of the rollout: ``routed_experts``, [tokens, layers, k] of prompt and completion, and
            ``sampling_mask``, a list of ids for each token of the completion, or None.

    Raises:
        DataError: a record of other tokens than the row's (of experts, that of the last token may be missing); a token
            that its sampler did not keep.
    """
    parts: Sequence[Any] = list(generated) if isinstance(generated, tuple) else []
    fields = [part for part in parts if isinstance(part, dict)]
    recorded = {name: list(part[name]) for part in fields for name in RECORDED if part.get(name) is not None}
    for number, (prompt, completion) in enumerate(zip(*parts[:2], strict=True) if recorded else ()):
        tokens = len(prompt) + len(completion)
        own = recorded[ROUTED][number] if ROUTED in recorded else None
        if own is not None and len(own) not in (0, tokens - 1, tokens):
            raise DataError(
                f"{ROUTED} of row {number} of the rollout has {len(own)} tokens, and its prompt and completion have "
                f"{len(prompt)} and {len(completion)}: record all of them in order (the last may be missing), with -1 "
                "where the router is to choose"
            )
        kept = recorded[KEPT][number] if KEPT in recorded else None
        if kept is not None:
            if len(kept) != len(completion):
                raise DataError(
                    f"{KEPT} of row {number} of the rollout has {len(kept)} lists of ids, and its completion has "
                    f"{len(completion)} tokens: record one for each, None where the sampler kept every id"
                )
            kept = [None] * len(prompt) + list(kept)
            Trajectory([*prompt, *completion], sampling_mask=kept, id=f"{number} of the rollout")  # raises
            recorded[KEPT][number] = kept
    return recorded


def _trains(model: nn.Module) -> bool:
    """Whether a call of the model now is one of training."""
    return torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
