"""One line that makes a transformers or TRL trainer compute shared prefixes once, with the trainer's own losses.

The trainers ask their model for the log-probabilities of a batch and compute the loss from them. Here the model's
forward answers these calls: it recovers the rows of the batch, scores them as a prefix tree (`TreeEngine.score`) and
returns leaves in the shape that the trainer expects. The trainer's own backward ends in the leaves, and their gradients
wait in ``.grad`` (`treetrain.core.engine.deferred`) until they run through the tree, once. That is at the end of the
last training step whose rows the tree holds, or when something needs the gradients earlier. No loss, metric or schedule
is copied.
"""

import functools
import importlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Trainer
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import ModelOutput

from treetrain.core.engine.ranks import Ranks
from treetrain.core.errors import UnsupportedModel
from treetrain.core.hf.capability import causal_lm
from treetrain.core.hf.tree_mode import RUN_KEYWORD, replaced
from treetrain.core.planning.make import Bytes
from treetrain.core.tree.images import IMAGE_INPUTS, IMAGE_TYPES
from treetrain.engine import TreeEngine
from treetrain.trainers.batches import TOKEN_TYPES, TREE_INDEX, ModelInputs, OutputKind, Rows, rows_of, with_labels
from treetrain.trainers.step_scores import Ask, StepScores, TreeScores

if TYPE_CHECKING:
    from treetrain.core.engine.score import Scored
    from treetrain.trainers.first_step import Sample
    from treetrain.trainers.gains import GainsState
    from treetrain.trainers.processes import Processes

T = TypeVar("T", bound=Trainer)
ASYNC_GRPO_ATTENTION = "tree_fa3"
"""The attention implementation that TRL sets on the model of an `AsyncGRPOTrainer`; its kernel is for Hopper GPUs."""
CACHES = ("past_key_values", "cache")
"""Names of the model's argument for the keys and values of a generation: before transformers 5.24, and since."""
KNOWN_ARGUMENTS = {
    *("input_ids", "attention_mask", "position_ids", "labels", "use_cache", "return_dict", "output_router_logits"),
    *("num_items_in_batch", "fused_lm_head", "seq_idx"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *TREE_INDEX,
    *("tree_max_seqlen_q", "tree_max_seqlen_k", "shift_labels"),
}
"""Keyword arguments of the model's forward that a tree supports."""
MEDIA = ("pixel_", "image_", "video_", "input_features", "audio_")
"""Beginnings of the names of keyword arguments that carry images, videos or sound."""
FUSED_SETTINGS = ("temperature", "cast_lm_head_to_fp32", "outputs")
FUSED_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""The settings of TRL's `add_fused_lm_head`, and the values of each token that it may compute."""
FUSED_TRAINERS = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer", "AsyncGRPOTrainer")
"""TRL's trainers whose models must have its fused head. Others are taken by what their models have."""
SCORES, OUTPUT, LATER = "the scores of labels", "its output", "an output without labels"
"""What a call may ask a model for: scores, which trees answer; what its own forward returns; or, in a loss of the
user's own, an output that may still be asked for log-probabilities (`TreeOutput`)."""
ASKED = "what the loss asks the model for"
PROCESSES = {
    "NO": "processes.Processes",
    "MULTI_CPU": "processes.Processes",
    "MULTI_GPU": "processes.Processes",
    "FSDP": "sharded_processes.ShardedProcesses",
    "DEEPSPEED": "zero_processes.ZeroProcesses",
}
"""How processes hold weights, by accelerate's distributed type."""


def share_prefixes(trainer: T, budget: int | str | Bytes | None = None, *, check: bool | Literal["rows"] = True) -> T:
    """Make a trainer compute every shared prefix of a batch once, in forward and backward, and return it.

    Losses, gradients, metrics and evaluation do not change. Rows of one optimizer step on one process
    share prefixes, across micro-batches; `PrefixGroupSampler` brings such rows together.

    Args:
        trainer: a `transformers.Trainer` with a causal LM, or one of TRL that takes rewards or log-probabilities of
            its fused head: `SFTTrainer`, `DPOTrainer`, `KTOTrainer`, `GRPOTrainer`, `RLOOTrainer`, `RewardTrainer`,
            `AsyncGRPOTrainer` and their subclasses; after construction and before ``train()``.
        budget: tokens whose graph is alive at once, or bytes ("8GiB") of peak memory above model, gradients and
            optimiser state; None uses the memory that is free.
        check: compare a few rows of the first training batch with the model's plain forward and backward, log the
            difference, and stop if it is too large. True runs the plain model on the batch as the trainer gives it;
            "rows" on each row by itself, where that batch changes its rows (padding that positions count, packed rows
            that see one another). False does not compare.

    Returns:
        the same object; its class is now a subclass of the one it had.

    Raises:
        UnsupportedModel: the model would not be exact on a tree.
        ValueError: a setting of the trainer that cannot be exact (the message says what to change), or a version of
            TRL whose trainers do not ask for log-probabilities in a known way.
    """
    if check not in (True, False, "rows"):
        raise ValueError(f"check is {check!r}; give True, False or 'rows'")
    if isinstance(trainer, SharesPrefixes):
        raise ValueError("this trainer shares prefixes already; call share_prefixes once")
    if not isinstance(trainer, Trainer):
        raise TypeError(f"share_prefixes takes a transformers.Trainer or a subclass, not a {type(trainer).__name__}")
    sharing = PrefixSharing(trainer, budget, check)
    plain = type(trainer)
    trainer.__class__ = type(plain.__name__, (SharesPrefixes, plain), {"__doc__": plain.__doc__})
    trainer.prefix_sharing = sharing  # type: ignore[attr-defined]
    return trainer


class SharePrefixesMixin:
    """Shared prefixes for subclasses of trainers: ``class MyTrainer(SharePrefixesMixin, DPOTrainer)``.

    Its ``__init__`` ends with `share_prefixes`, which works around the methods that the subclass overrides.

    Args:
        budget, check: see `share_prefixes`; all other arguments are the trainer's.
    """

    def __init__(
        self, *args: Any, budget: int | str | Bytes | None = None, check: bool | Literal["rows"] = True, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        share_prefixes(self, budget, check=check)  # type: ignore[type-var]


class SharesPrefixes:
    """The methods that `share_prefixes` puts around those of a trainer."""

    prefix_sharing: "PrefixSharing"

    def train(self, *args: object, **kwargs: object) -> object:
        """Train as the trainer does. If another process has ended, the error says which."""
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
        with self.prefix_sharing.loss_of(model) as inner:
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


class FusedHead(NamedTuple):
    """The settings of TRL's `add_fused_lm_head`: how a trainer asks its model to score labels."""

    temperature: float = 1.0
    outputs: tuple[str, ...] = ("log_probs",)

    @classmethod
    def of(cls, model: nn.Module) -> "FusedHead":
        """Read the settings from TRL's closure around the model's forward.

        Raises:
            ValueError: there is none, or it has settings that are not known here.
        """
        import trl
        from trl.trainer import utils

        from treetrain.trainers.relied_on import TESTED

        forward = _fused_forward(model)
        if forward is None:
            raise ValueError(
                f"trl {trl.__version__} does not give its model the fused head by which trainers of TRL "
                f"{' to '.join(TESTED['trl'])} ask for log-probabilities (add_fused_lm_head): install one of these"
            )
        settings = inspect.getclosurevars(getattr(forward, "__func__", forward)).nonlocals
        if settings["cast_lm_head_to_fp32"]:
            raise ValueError("cast_lm_head_to_fp32=True: the head runs in the model's dtype here; set it to False")
        outputs = tuple(settings["outputs"])
        known = {*utils.FusedCausalLMOutput.__dataclass_fields__} & {*FUSED_OUTPUTS}
        unknown = [f"outputs={name}" for name in outputs if name not in known]
        for name, parameter in inspect.signature(utils.add_fused_lm_head).parameters.items():
            value = settings.get(name, parameter.default)
            if name not in ("model", *FUSED_SETTINGS) and value != parameter.default:
                unknown.append(f"{name}={value}")
        if unknown:
            raise ValueError(f"the fused head of trl {trl.__version__} has {', '.join(unknown)}, not known here")
        return cls(float(settings["temperature"]), outputs)


def _is_fused(forward: object) -> bool:
    """Whether this is the forward that TRL's `add_fused_lm_head` installs."""
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return {*FUSED_SETTINGS} <= {*getattr(code, "co_freevars", ())}


def _fused_forward(model: nn.Module) -> Any:
    """The forward that TRL's `add_fused_lm_head` has installed beneath others; None if it has not."""
    forward = causal_lm(model).forward
    while forward is not None and not _is_fused(forward):
        forward = getattr(forward, "__wrapped__", None)
    return forward


class PrefixSharing:
    """Answers the calls of a trainer's models from trees.

    The state of an optimizer step is in ``steps.step``, which each step makes anew; here is what stays during a run.
    """

    def __init__(self, trainer: Trainer, budget: int | str | Bytes | None, check: bool | Literal["rows"]):
        from treetrain.trainers.gains import Gains
        from treetrain.trainers.relied_on import warn_if_untested

        self.output_kind: OutputKind = output_kind_of(trainer)
        check_trainer(trainer, self.output_kind)
        module, _, kind = PROCESSES[trainer.accelerator.distributed_type.value].partition(".")
        module = importlib.import_module(f"treetrain.trainers.{module}")
        self.processes: Processes = getattr(module, kind)(trainer)
        self.trainer, self.budget, self.check = trainer, budget, check
        self._checks = bool(check)
        """Whether engines compare a model at first use, where the comparison of the first step does not."""
        self._settle = _weakly(self.settle)
        assert trainer.model is not None
        self.model: nn.Module = trainer.model
        self.wrapped = self.model
        """The model as the trainer calls it, such as within DistributedDataParallel."""
        self._rows_of = functools.partial(rows_of, rewards=self.output_kind == "rewards", model=self.model)
        self.steps = StepScores(trainer, self._rows_of)
        self.in_loss = False
        """Whether the trainer is in `compute_loss`, where calls with labels ask for scores."""
        self.wants_logits = False
        """Whether it reads the logits of the output that also has the loss, so that the plain forward gives both."""
        self._compared = False
        """Whether the settings of all ranks have been compared."""
        self._engines: dict[tuple[object, float], TreeEngine] = {}
        self.gains = Gains(trainer)
        if getattr(self.model.config, "_attn_implementation", None) == ASYNC_GRPO_ATTENTION:
            self.model.set_attn_implementation("sdpa")  # type: ignore[operator]
        models = [
            trainer.accelerator.unwrap_model(model)
            for model in (trainer.model, getattr(trainer, "ref_model", None))
            if model is not None
        ]
        heads = [FusedHead.of(model) if self.output_kind == "fused" else FusedHead() for model in models]
        for model, head in zip(models, heads):
            self._engine(model, head)  # raises before any forward is replaced
        for model, head in zip(models, heads):
            if _is_fused((inner := causal_lm(model)).forward) and inner is not model:
                inner.forward = OwnForward(inner)  # beneath an adapter
            setattr(model, self.processes.call, TreeForward(self, model, head))
        self._head = heads[0]
        for package in ("transformers",) if self.output_kind == "loss" else ("transformers", "trl"):
            warn_if_untested(package)
        if trainer.accelerator.num_processes > 1:
            before = _weakly(self._before_step)
            hook = register_optimizer_step_pre_hook(lambda optimizer, _args, _kwargs: before(optimizer))
            weakref.finalize(self, hook.remove)

    def _engine(self, model: nn.Module, head: FusedHead) -> TreeEngine:
        key = (self.processes.engine_key(model), head.temperature)
        if key not in self._engines:
            training = model.training
            model.train()  # so that checks see active dropout
            try:
                self._engines[key] = TreeEngine(
                    model, budget=self.budget, temperature=head.temperature, check=self._checks
                )
            finally:
                model.train(training)
        return self._engines[key]

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
        if not self._compared:
            self._compare_settings(model)
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

    def _compare_settings(self, model: nn.Module) -> None:
        """Raise RanksDisagree on all ranks, before the first step, unless they have the same settings."""
        sharing = self._engine(model, self._head).sharing
        with sharing.ranks.together("share_prefixes"):
            self.processes.check_prepared(model)
            if not sharing.ranks.alone:
                settings = {
                    **self._versions(),
                    "the trainer": type(self.trainer).__name__,
                    "check": self.check,
                    "the temperature and outputs of the trainer's scores": self._head,
                    "gradient_accumulation_steps": self.trainer.args.gradient_accumulation_steps,
                    "trained weights": sum(p.requires_grad for p in model.parameters()),
                }
                sharing.ranks.same(settings)
        self.steps.ranks, self.steps.all_ranks, self._compared = sharing.passes_with, sharing.ranks, True

    def _versions(self) -> dict[str, str]:
        """The versions of the packages that a step runs through."""
        used = {kind.__module__.partition(".")[0] for kind in (*type(self.trainer).__mro__, *type(self.model).__mro__)}
        used |= {"deepspeed"} if self.trainer.is_deepspeed_enabled else set()
        packages = ("treetrain", "torch", "transformers", "accelerate", *sorted(used & {"trl", "peft", "deepspeed"}))
        return {name: importlib.import_module(name).__version__ for name in packages}

    def settle(self, *, everything: bool = True, last: bool | None = None) -> None:
        """Run gradients that wait through their trees.

        Args:
            everything: also trees that hold rows of micro-batches to come, which are then scored again.
            last: gradients become those of all processes, unless they are already; None: if this is the last
                micro-batch.
        """
        last = bool(self.trainer.accelerator.sync_gradients) if last is None else last
        engine = self._engine(self.wrapped, self._head)
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
        logits = logits and self.output_kind == "loss"
        with replaced(self.steps.step, training=False), replaced(self, wants_logits=logits):
            yield

    # ---- The model's calls ----

    def answer(self, forward: "TreeForward", args: tuple, kwargs: ModelInputs) -> object:
        """The result of a call of the model's forward: from a tree if it asks for scores, else its own."""
        model, plain, head = forward.module, forward.plain, forward.head
        gradients = torch.is_grad_enabled()
        if self.in_loss and self.output_kind == "loss" and args:
            # A PeftModel without a task takes any arguments and hands them on.
            kinds = (type(model), type(causal_lm(model)))
            parameters = [list(inspect.signature(kind.forward).parameters.values())[1:] for kind in kinds]
            own = next((each for each in parameters if each and each[0].kind is each[0].POSITIONAL_OR_KEYWORD), [])
            names = [each.name for each in own]
            args, kwargs = (), dict(zip(names, args)) | kwargs
        if RUN_KEYWORD in kwargs:
            return plain(*args, **kwargs)
        asks = self._asks_for(args, kwargs)
        if asks == OUTPUT and not self.in_loss:
            return plain(*args, **kwargs)
        known = KNOWN_ARGUMENTS | image_arguments(model, kwargs)
        unknown = sorted(
            name
            for name, value in kwargs.items()
            if name not in known and value is not None and not (name in TOKEN_TYPES and not value.any())
        )
        training = gradients and any(p.requires_grad for p in model.parameters())
        engine = self._engine(self.wrapped if training and model is self.model else model, head)
        ranks, asked = engine.sharing.passes_with, kwargs
        with ranks.together("the model's call"):
            asks = _agreed(ranks, asks, odd=bool(unknown))
            if asks == SCORES:
                if unknown:
                    raise refused_arguments(unknown)
                kwargs = with_labels(kwargs)
                rows = self._rows_of(kwargs)
        if asks == LATER:
            return TreeOutput(forward, {name: value for name, value in kwargs.items() if name != "shift_labels"})
        if asks == OUTPUT:
            if self.in_loss and gradients and not args:
                self.gains.add_call(kwargs)
            return plain(*args, **kwargs)
        with self.processes.autocast():
            if training and self.check:
                self._check_first_step(forward, head, rows, kwargs, self.output_kind)
            with self._balanced(model, kwargs) as balanced:
                scores, own = self._scored(engine, model, head, rows, training, balanced=balanced)
            output = self._output(forward, engine, scores, own, rows, kwargs)
        if self.output_kind == "fused" and kwargs is not asked:  # with a column for what follows the last token
            for name in (*FUSED_OUTPUTS, "label_mask"):
                if (value := getattr(output, name)) is not None:
                    setattr(output, name, nn.functional.pad(value, (0, 1)))
        return output

    def token_logprobs(
        self, forward: "TreeForward", inputs: ModelInputs, temperature: float, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Answer `treetrain.token_logprobs` for a batch from a tree."""
        model, head = forward.module, FusedHead(temperature, ("log_probs", "entropy") if entropy else ("log_probs",))
        training = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
        engine = self._engine(self.wrapped if training and model is self.model else model, head)
        ranks = engine.sharing.passes_with
        with ranks.together("the model's call"):
            _agreed(ranks, "tt.token_logprobs")
            rows = rows_of(inputs, model=model)
        with self.processes.autocast(), self._balanced(model, {}, allowed=False):
            if training and self.check:
                self._check_first_step(forward, head, rows, inputs, "tokens")
            scores, own = self._scored(engine, model, head, rows, training, balanced=False)
        scored = scores.scored
        assert scored is not None
        logprobs = self.steps.keeping(scores, rows.batch(scored.logprobs[own]))
        entropies = None if scored.entropies is None else rows.batch(scored.entropies[own])
        return logprobs, None if entropies is None else self.steps.keeping(scores, entropies)

    def _asks_for(self, args: tuple, kwargs: ModelInputs) -> str:
        """Tell whether a call asks for `SCORES`, from a tree, for the model's own `OUTPUT`, or `LATER` for scores."""
        rows = kwargs.get("input_ids") is not None and all(kwargs.get(name) is None for name in CACHES)
        if not rows or self.wants_logits:
            return OUTPUT  # it generates, or wants logits for an evaluation
        labels = kwargs.get("labels") is not None
        if self.in_loss and self.output_kind == "loss" and not labels:
            wanted = torch.is_grad_enabled() or callable(self.trainer.compute_loss_func)
            return LATER if wanted else OUTPUT
        if args:
            return OUTPUT
        if self.output_kind == "fused":
            return SCORES if kwargs.get("fused_lm_head") else OUTPUT
        return SCORES if self.in_loss and (self.output_kind == "rewards" or labels) else OUTPUT

    def _check_first_step(
        self, forward: "TreeForward", head: FusedHead, rows: Rows, kwargs: ModelInputs, kind: OutputKind
    ) -> None:
        """Compare a few rows with the plain model; all ranks stop if one of them does. See `FirstStep`."""
        from treetrain.trainers.first_step import all_labelled, sample_of

        engine = self._engine(self.wrapped if forward.module is self.model else forward.module, head)
        collective = engine.sharing.collective
        with (
            engine.ranks.together("the comparison in the first step"),
            replaced(self.steps, waiting=[]),
            self.processes.comparison(forward.module),
        ):
            sample = sample_of(kwargs, rows)
            predicts = bool(sample.chosen)
            if collective and not predicts:  # it can run the passes with ranks that predict something
                labelled = all_labelled(kwargs, rows)
                sample = sample_of(labelled, self._rows_of(labelled))
            each_predicts, each_runs = zip(*engine.ranks.exchange((predicts, bool(sample.chosen))))
            if not any(each_predicts) or (collective and not all(each_runs)):
                return  # the next batch is compared
            if sample.chosen:
                self._compare(forward, head, sample, kind, engine.sharing.passes_with)
        self.check = False

    def _compare(
        self, forward: "TreeForward", head: FusedHead, sample: "Sample", kind: OutputKind, ranks: Ranks
    ) -> None:
        """Run a sample through the plain model and the tree, and raise an error if they differ.

        Args:
            ranks: those that run every pass together.
        """
        from treetrain.check.first_use import accept
        from treetrain.trainers.first_step import FirstStep

        alone = self.check == "rows"
        with self._balanced(forward.module, sample.call) as balanced:
            if alone and balanced and kind == "loss":
                raise ValueError(
                    "check='rows' runs the plain model on each row by itself, which a loss with the routers' auxiliary "
                    "loss of a whole batch does not allow: take True or False"
                )
        own, temperature = self._engine(forward.module, head), head.temperature
        accept(own)
        first = FirstStep(own, sample, kind, forward.plain, temperature=temperature, alone=alone, ranks=ranks)
        first.run_plain()
        for engine in first.engines:
            with first.tree_run():
                first.backward_of_tree(*self._answered(forward, head, first.batch, engine))
        self.gains.once, self.gains.plain_rate = first.judge(repeatable=True)

    def _answered(
        self, forward: "TreeForward", head: FusedHead, batch: ModelInputs, engine: TreeEngine
    ) -> tuple[Any, Tensor, "Scored"]:
        """The output that a call gets by itself, its scores as a batch, and what runs their backward."""
        model, rows = forward.module, self._rows_of(batch)
        scores = TreeScores(0, [rows])
        with self._balanced(model, batch):
            scored = scores.scored = self._run(engine, head, scores)
        output = self._output(forward, engine, scores, slice(0, len(rows.ids)), rows, batch)
        return output, rows.batch(scored.logprobs) if scored.rewards is None else output.logits, scored

    def _run(self, engine: TreeEngine, head: FusedHead, scores: TreeScores) -> "Scored":
        if self.output_kind == "rewards":
            return engine.score(scores.tree, rewards=True)
        statistics = bool({"is_top1", "mean_logits", "log_sum_sq_probs"} & set(head.outputs))
        return engine.score(scores.tree, mask=scores.masks, entropies="entropy" in head.outputs, statistics=statistics)

    @contextmanager
    def _balanced(self, model: nn.Module, kwargs: ModelInputs, *, allowed: bool = True) -> Iterator[bool]:
        """Inside the block, the configuration asks for the routers' auxiliary loss if the call does; yields whether.

        A call may ask for it even if the model's configuration does not.

        Args:
            allowed: False if the caller does not want this loss, whatever the configuration says.
        """
        config = causal_lm(model).config.get_text_config()
        configured = getattr(config, "output_router_logits", False)
        balanced = bool(allowed and (configured or kwargs.get("output_router_logits")))
        with replaced(config, **({} if balanced == bool(configured) else {"output_router_logits": balanced})):
            yield balanced

    def _scored(
        self, engine: TreeEngine, model: nn.Module, head: FusedHead, rows: Rows, training: bool, *, balanced: bool
    ) -> tuple[TreeScores, slice]:
        """The scores of a tree that holds these rows, and the slice of its rows that they are."""
        from treetrain.check.first_use import users_hooks
        from treetrain.core.engine.engine_model import ScoredModel

        collective = engine.sharing.collective
        # Hooks of parameters see the gradient of every micro-batch; those of shards see that of a step, or none.
        hooked = training and any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
        alone = balanced or (not collective and (hooked or bool(users_hooks(model))))
        if training:
            self.settle(everything=False, last=False)  # several trees in a micro-batch would be alive at once
        ask = Ask.of(model, head, engine.prepared.device.type)
        scores, own = self.steps.scores_for(ask, rows, together=not alone)
        if scores.scored is None:
            started = self.gains.now() if training else 0.0
            joint = scores.last > scores.first
            before = None
            if joint and not training:
                engine.prepared.check()
                before = ScoredModel(engine.prepared)
            scores.scored = self._run(engine, head, scores)
            if before is not None:
                before.leave_out_changes()
            scores.model = (before or scores.scored.model) if joint else None
            if training:
                self.processes.scored(scores.scored, self._settle)
                self.gains.add(scores.scored, scores.tree, engine.prepared.cost, started)
        if balanced and scores.scored.aux_loss is None and self.output_kind != "rewards":
            raise ValueError(
                "the trainer asks for the routers' auxiliary loss, but router_aux_loss_coef of the model's "
                "configuration is 0 or not known; set it to the trainer's own"
            )
        return scores, own

    def _output(
        self,
        forward: "TreeForward",
        engine: TreeEngine,
        scores: TreeScores,
        own: slice,
        rows: Rows,
        kwargs: ModelInputs,
    ) -> Any:
        """Return the output that the trainer gets for a call: scores of its own rows, in the shape of its batch."""
        scored = scores.scored
        assert scored is not None
        if scored.rewards is not None:
            rewards = self.steps.keeping(scores, scored.rewards[own])
            return SequenceClassifierOutput(logits=rewards if rewards.dim() == 2 else rewards[:, None])  # type: ignore[arg-type]

        def batch(values: Sequence[Tensor] | None) -> Tensor | None:
            return None if values is None else rows.batch(values[own])

        log_probs = self.steps.keeping(scores, rows.batch(scored.logprobs[own]))
        normaliser = kwargs.get("num_items_in_batch")
        if normaliser is None:
            normaliser = rows.wanted.sum().clamp(min=1 if self.output_kind == "fused" else 0)
        loss, aux = -log_probs.sum() / normaliser, scored.aux_loss
        if aux is not None:
            aux = self.steps.keeping(scores, aux)
            loss = loss + engine.capabilities.auxiliary * aux
        if self.output_kind == "loss":
            return TreeOutput(forward, kwargs, loss, aux)
        from trl.trainer.utils import FusedCausalLMOutput

        is_top1, entropies = batch(scored.is_top1), batch(scored.entropies)
        return FusedCausalLMOutput(
            loss=loss,
            log_probs=log_probs,
            entropy=None if entropies is None else self.steps.keeping(scores, entropies),
            log_sum_sq_probs=batch(scored.log_sum_sq_probs),
            mean_logits=batch(scored.mean_logits),
            is_top1=None if is_top1 is None else is_top1.bool(),
            label_mask=rows.wanted,
            aux_loss=aux,
        )

    def refusal(self, name: str) -> str:
        """Say what to write in a loss of the user's own that reads this of the model's output."""
        given = callable(self.trainer.compute_loss_func)
        where, call = ("compute_loss_func", "outputs, labels") if given else ("compute_loss", "model, inputs")
        return (
            f"{where} reads {name} of the model's output, which share_prefixes does not compute. Take the labels' "
            "log-probabilities, which are the same with and without it:\n"
            f"    logprobs = tt.token_logprobs({call})  # [B, L - 1], 0 where a label is -100\n"
            "    loss = -logprobs.sum() / num_items_in_batch"
        )

    def state_dict(self) -> "GainsState":
        """Return the state on which the next logs depend; the checkpoints of `SafeCheckpointsMixin` keep it."""
        return self.gains.state_dict()

    def load_state_dict(self, state: "GainsState") -> None:
        """Go on with the logs of a stopped run."""
        self.gains.load_state_dict(state)


class OwnForward:
    """Stands for a forward that was set on one module. A copy or pickle of the module has the forward of its class.

    In a copy, the forward that TRL sets would call the model that it was made for.
    """

    def __init__(self, module: nn.Module, name: str = "forward"):
        self.module, self._name, self.plain = module, name, getattr(module, name)
        functools.update_wrapper(self, self.plain)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.plain(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return getattr, (self.module, self._name)  # a copy has no attributes yet, so this is the class's forward


class TreeForward(OwnForward):
    """Stands for the forward of a model, and answers calls for scores from a tree.

    It belongs to one model of one trainer. In copies and pickles of the model the plain forward takes its place.
    """

    def __init__(self, sharing: PrefixSharing, model: nn.Module, head: FusedHead):
        super().__init__(model, sharing.processes.call)
        self._sharing, self.head = sharing, head
        self._replaces = vars(model).get(self._name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._sharing.answer(self, args, kwargs)

    def token_logprobs(self, inputs: ModelInputs, temperature: float, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of a batch from a tree, and entropies; see `treetrain.token_logprobs`."""
        return self._sharing.token_logprobs(self, inputs, temperature, entropy=entropy)

    @property
    def runs_alone(self) -> bool:
        """Whether this process runs passes of the model by itself."""
        return self._sharing.steps.ranks.alone

    def refusal(self, name: str) -> str:
        """Say what to write in place of a read of the model's output."""
        return self._sharing.refusal(name)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (
            super().__reduce__() if self._replaces is None or _is_fused(self._replaces) else (_same, (self._replaces,))
        )


class TreeOutput:
    """The output of a call of a plain Trainer's model, which a tree answers: its loss, and no logits.

    It is what `compute_loss` and a ``compute_loss_func`` get. Reading anything else of it raises an error; without
    gradients, as in an evaluation, the plain model gives it.

    Args:
        inputs: the arguments of the call.
        loss: the model's, None without labels.
        aux_loss: the routers' auxiliary loss, None without one.
    """

    def __init__(
        self, forward: TreeForward, inputs: ModelInputs, loss: Tensor | None = None, aux_loss: Tensor | None = None
    ):
        self.loss, self.aux_loss = loss, aux_loss
        self._forward, self._inputs = forward, inputs
        self._evaluates, self._plain = not torch.is_grad_enabled() and forward.runs_alone, None

    def _plain_output(self, name: str) -> Any:
        """The output of the plain model.

        Raises:
            RuntimeError: with gradients, or where ranks would have to run it together; the message says what to write
                in place of this name.
        """
        if not self._evaluates:
            raise RuntimeError(self._forward.refusal(name))
        if self._plain is None:
            with torch.no_grad():
                self._plain = self._forward.plain(**self._inputs)
        return self._plain

    def token_logprobs(
        self, labels: Tensor | None, temperature: float, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the labels' tokens, and entropies; see `treetrain.token_logprobs`."""
        return self._forward.token_logprobs(self._inputs | {"labels": labels}, temperature, entropy=entropy)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not _is_in_outputs(name):  # such as "dtype", which accelerate asks for
            raise AttributeError(f"the output of a model has no {name}")
        return getattr(self._plain_output(f".{name}"), name)  # an AttributeError would be no error for hasattr

    def __getitem__(self, key: object) -> Any:
        if isinstance(key, slice):  # which `Trainer.prediction_step` asks for whether it needs logits or not
            return tuple(x for x in (self.loss,) if x is not None)[key]
        if key in ("loss", 0) and self.loss is not None:
            return self.loss
        return self._plain_output(f"[{key!r}]")[key]

    def __contains__(self, key: object) -> bool:
        return key == "loss" and self.loss is not None


def _is_in_outputs(name: str) -> bool:
    """Whether an output of any loaded model has an attribute of this name."""
    kinds = [ModelOutput]
    for kind in kinds:  # and their subclasses, which the list gets meanwhile
        kinds += kind.__subclasses__()
    return hasattr(ModelOutput, name) or any(name in getattr(kind, "__dataclass_fields__", ()) for kind in kinds)


def _agreed(ranks: Ranks, asks: str, *, odd: bool = False) -> str:
    """Tell what a call asks the model for. Ranks that run every pass together must agree on it.

    Args:
        odd: it has inputs that trees do not know.

    Raises:
        RanksDisagree: on all of these ranks; they ask for different things.
    """
    each, any_odd = zip(*ranks.exchange((asks, odd)))
    if not torch.is_grad_enabled() and {*each} <= {SCORES, OUTPUT} and (OUTPUT in each or any(any_odd)):
        return OUTPUT  # the plain forward gives scores too, and no gradient is at stake
    if len({*each}) > 1:
        ranks.same({ASKED: asks})
    return asks


def _same(forward: Callable[..., object]) -> Callable[..., object]:
    return forward


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A call of the method that does not keep its object alive. When the object is gone, it does nothing."""
    reference = weakref.WeakMethod(method)

    def call(*args: object, **kwargs: object) -> None:
        if (alive := reference()) is not None:
            alive(*args, **kwargs)

    return call


# ---- Checks of the settings before training


def image_arguments(model: nn.Module, given: Iterable[str]) -> set[str]:
    """Those of a call's arguments that give the model images, if trees of this model compute images."""
    images = {*IMAGE_INPUTS, IMAGE_TYPES} & {*given}
    if not images:
        return images
    from treetrain.layers.images.encoders import arguments_of, image_encoder, takes_images

    inner = image_encoder(model)
    if inner is None or not takes_images(model):
        return set()
    return images & {*arguments_of(inner), IMAGE_TYPES}


def refused_arguments(unknown: Sequence[str]) -> ValueError:
    """The error for a call with arguments of these names, which trees do not know."""
    from treetrain.layers.images.encoders import FAMILIES

    if media := [name for name in unknown if name.startswith(MEDIA) or name in TOKEN_TYPES]:
        return ValueError(
            f"the batch has images ({', '.join(media)}), which share_prefixes does not compute on trees of this model: "
            f"it takes rows of text, and images ({', '.join(IMAGE_INPUTS)}, no videos) of {', '.join(FAMILIES)}; leave "
            "such rows out, or train without share_prefixes"
        )
    return ValueError(
        f"the model is called with {', '.join(unknown)}, which is not known to be exact on a tree; leave it "
        "out of the batch, or train without share_prefixes"
    )


def output_kind_of(trainer: Trainer) -> OutputKind:
    """The kind of output that this trainer reads of its model.

    Raises:
        ValueError: a trainer of TRL that asks its model for something else than the fused head's scores, or rewards.
    """
    names = [kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")]
    names = [name for name in names if name != "_BaseTrainer"]
    if not names:
        return "loss"
    if "RewardTrainer" in names:
        return "rewards"
    assert trainer.model is not None
    if not {*names} & {*FUSED_TRAINERS} and _fused_forward(trainer.model) is None:
        raise ValueError(
            f"{names[0]} of TRL asks its model for logits, which no tree gives; share_prefixes takes RewardTrainer and "
            f"trainers of TRL whose model has its fused head, such as {', '.join(FUSED_TRAINERS)}. In a subclass whose "
            "compute_loss takes tt.token_logprobs(model, inputs) from a plain transformers.Trainer, prefixes are shared"
        )
    return "fused"


def check_trainer(trainer: Trainer, output_kind: OutputKind) -> None:
    """Refuse settings that cannot be exact.

    Raises:
        ValueError, UnsupportedModel: the message names the setting to change.
    """
    args, accelerator, model = trainer.args, trainer.accelerator, trainer.model
    assert model is not None
    distributed = str(accelerator.distributed_type.value)
    parallelism = getattr(args, "parallelism_config", None) or getattr(accelerator, "parallelism_config", None)
    columns = {*(getattr(trainer.train_dataset, "column_names", None) or ())}
    offloads = getattr(args, "activation_offloading", False)
    dynamo = accelerator.state.dynamo_plugin
    compiles = "NO" if dynamo is None else dynamo.backend.value
    refusals: dict[str, object] = {
        f"distributed_type={distributed}; launch one process, DistributedDataParallel, FSDP2 (fsdp_version: 2) or "
        "DeepSpeed": (distributed not in PROCESSES),
        f"torch.nn.DataParallel over {args.n_gpu} GPUs; launch one process for each with torchrun": args.n_gpu > 1,
        "fp16=True and its gradient scaler; set bf16=True instead": args.fp16 or accelerator.scaler is not None,
        "torch_compile=True, since the attention is switched at every call; set it to False": args.torch_compile,
        f"accelerate's dynamo_backend: {compiles}, which compiles the model; leave dynamo_config out": compiles != "NO",
        "use_liger_kernel=True, which replaces the model's layers; set it to False": args.use_liger_kernel,
        f"neftune_noise_alpha={args.neftune_noise_alpha}: a shared token would get one noise where every row has its "
        "own; set it to None": args.neftune_noise_alpha,
        f"label_smoothing_factor={args.label_smoothing_factor}, which needs the probabilities of all tokens; set it "
        "to 0": args.label_smoothing_factor,
        "model_init, which makes another model later; give the trainer a model": trainer.model_init is not None,
        "activation_offloading=True: the tree's backward comes after the trainer's; bound memory by budget=": offloads,
        "parallelism_config: context, sequence and tensor parallelism cut rows apart; leave it out": parallelism,
        "a tensor-parallel model (tp_plan), which has not been verified here; take tt.TreeEngine in a loop of your "
        "own": (getattr(causal_lm(model), "_tp_size", None) or 1) > 1,
        f"optim={args.optim}, which updates weights within the trainer's backward, before the tree's; take "
        "another": "lomo" in args.optim or "layerwise" in args.optim,
    }
    for reason, refused in refusals.items():
        if refused:
            raise ValueError(f"share_prefixes cannot be exact with {reason}")
    if images := {"image", "images"} & columns:
        from treetrain.layers.images.encoders import FAMILIES, takes_images

        if not takes_images(model):
            raise ValueError(
                f"share_prefixes cannot be exact with images (column {', '.join(images)} of train_dataset); give rows "
                f"of text, or a model of {', '.join(FAMILIES)}"
            )
    if output_kind != "loss":
        return
    lm = causal_lm(model)
    kind = getattr(lm, "loss_type", None)  # None is the cross-entropy too
    if kind is not None and LOSS_MAPPING.get(kind) is not ForCausalLMLoss:
        raise UnsupportedModel(
            f"{type(lm).__name__} has loss_type={kind}; with a plain Trainer, give a causal LM whose loss is the "
            "cross-entropy (ForCausalLM)"
        )
