"""One line that makes a transformers or TRL trainer compute shared prefixes once, with the trainer's own losses.

The trainers ask their model for the log-probabilities of a batch and compute the loss from them. Here the model's
forward answers these calls: it recovers the rows of the batch, scores them as a prefix tree (`TreeEngine.score`) and
returns leaves in the shape that the trainer expects. The trainer's own backward ends in the leaves, and their gradients
wait in ``.grad`` (`treetrain.engine.deferred`) until they run through the tree, once. That is at the end of the last
training step whose rows the tree holds, or when something needs the gradients earlier. No loss, metric or schedule is
copied.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutput, SequenceClassifierOutput

from treetrain.engine.engine import TreeEngine
from treetrain.engine.extensions.process_group import is_sharded
from treetrain.engine.model_state import switches_of
from treetrain.engine.score import Scored
from treetrain.errors import UnsupportedModel
from treetrain.models.capability import causal_lm
from treetrain.models.tree_mode import RUN_KEYWORD, replaced
from treetrain.planning.make import Bytes
from treetrain.trainers.batches import TREE_INDEX, Rows, rows_of
from treetrain.trainers.first_step import FirstStep, Seam, rows_to_compare
from treetrain.trainers.gains import Gains
from treetrain.trainers.step_scores import StepScores, TreeScores, gradient_versions

T = TypeVar("T", bound=Trainer)
ASYNC_GRPO_ATTENTION = "tree_fa3"
"""The attention implementation that TRL sets on the model of an `AsyncGRPOTrainer`; its kernel is for Hopper GPUs."""
KNOWN_ARGUMENTS = {
    *("input_ids", "attention_mask", "position_ids", "labels", "use_cache", "return_dict", "output_router_logits"),
    *("num_items_in_batch", "fused_lm_head", "seq_idx"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *TREE_INDEX,
    *("tree_max_seqlen_q", "tree_max_seqlen_k", "shift_labels"),
}
"""Keyword arguments of the model's forward that a tree supports."""
TRL_VERSION = "1.16"
_FUSED = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer", "AsyncGRPOTrainer")
SEAM_OF_TRAINER: dict[str, Seam] = {"RewardTrainer": "rewards", **{name: "fused" for name in _FUSED}}
"""The seam of each TRL trainer, by class name."""
HANDING_ON = ("treetrain.", "axolotl.core.trainers.base")
"""Module prefixes of trainers whose compute_loss passes the batch to that of `transformers.Trainer`."""


def share_prefixes(trainer: T, budget: int | str | Bytes | None = None, *, check: bool = True) -> T:
    """Make a trainer compute every shared prefix of a batch once, in forward and backward, and return it.

    Losses, gradients, metrics and evaluation do not change. Rows of one optimizer step on one process
    share prefixes, across micro-batches; `PrefixGroupSampler` brings such rows together.

    Args:
        trainer: a `transformers.Trainer` with a causal LM, or an `SFTTrainer`, `DPOTrainer`, `KTOTrainer`,
            `GRPOTrainer`, `RLOOTrainer`, `RewardTrainer` or `AsyncGRPOTrainer` of TRL 1.16, after construction and
            before ``train()``.
        budget: tokens whose graph is alive at once, or bytes ("8GiB") of peak memory above model, gradients and
            optimiser state; None uses the memory that is free.
        check: compare a few rows of the first training batch with the model's plain forward and backward, log the
            difference, and stop if it is too large.

    Returns:
        the same object; its class is now a subclass of the one it had.

    Raises:
        UnsupportedModel: the model would not be exact on a tree.
        ValueError: a setting of the trainer that cannot be exact (the message says what to change), or an unsupported
            version of TRL.
    """
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

    def __init__(self, *args: Any, budget: int | str | Bytes | None = None, check: bool = True, **kwargs: Any):
        super().__init__(*args, **kwargs)
        share_prefixes(self, budget, check=check)  # type: ignore[type-var]


class SharesPrefixes:
    """The methods that `share_prefixes` puts around those of a trainer."""

    prefix_sharing: "PrefixSharing"

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Get the micro-batches of the next optimizer step, which are scored as one tree if they share prefixes."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self.prefix_sharing.steps.begin_step(batches)
        return batches, num_items

    def _get_per_token_logps_and_entropies(self, *args: Any, batch_size: int | None = None, **kwargs: Any) -> Any:
        """Score all rows of GRPO or RLOO in one call: `batch_size` is ignored, since the budget bounds memory."""
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Run the trainer's training step, and the backward of the trees whose rows have all been trained."""
        with self.prefix_sharing.training_step(model):
            return super().training_step(model, *args, **kwargs)  # type: ignore[misc]

    def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute the trainer's loss from the tree's scores."""
        with self.prefix_sharing.loss_of(model) as inner:
            return super().compute_loss(inner, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the trainer's evaluation; if logits are wanted, the model's own forward computes them."""
        with self.prefix_sharing.evaluation(logits=not prediction_loss_only):
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
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
        """Read the settings from TRL's closure around the model's forward; without one use the defaults."""
        forward: Any = causal_lm(model).forward
        while forward is not None:
            if _is_fused(forward):
                settings = inspect.getclosurevars(getattr(forward, "__func__", forward)).nonlocals
                if settings["cast_lm_head_to_fp32"]:
                    raise ValueError(
                        "cast_lm_head_to_fp32=True: the head runs in the model's dtype here; set it to False"
                    )
                return cls(float(settings["temperature"]), tuple(settings["outputs"]))
            forward = getattr(forward, "__wrapped__", None)
        return cls()


def _is_fused(forward: Any) -> bool:
    """Whether this is the forward that TRL's `add_fused_lm_head` installs."""
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return "cast_lm_head_to_fp32" in getattr(code, "co_freevars", ())


class PrefixSharing:
    """Answers the calls of a trainer's models from trees.

    The state of an optimizer step is in ``steps.step``, which each step makes anew; here is what stays during a run.
    """

    def __init__(self, trainer: Any, budget: int | str | Bytes | None, check: bool):
        self.seam: Seam = seam_of(trainer)
        check_trainer(trainer, self.seam)
        self.trainer, self.budget, self.check = trainer, budget, check
        self.model: nn.Module = trainer.model
        self.wrapped = self.model
        """The model as the trainer calls it, such as within DistributedDataParallel."""
        self._rows_of = functools.partial(rows_of, rewards=self.seam == "rewards")
        self.steps = StepScores(trainer, self._rows_of)
        self.in_loss = False
        """Whether the trainer is in `compute_loss`, where calls with labels ask for scores."""
        self._engines: dict[tuple[int, float], TreeEngine] = {}
        self.gains = Gains(trainer)
        if getattr(self.model.config, "_attn_implementation", None) == ASYNC_GRPO_ATTENTION:
            self.model.set_attn_implementation("sdpa")  # type: ignore[operator]
        models = [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
        heads = [FusedHead.of(model) for model in models]
        for model, head in zip(models, heads):
            self._engine(model, head)  # raises before any forward is replaced
        for model, head in zip(models, heads):
            if _is_fused((inner := causal_lm(model)).forward) and inner is not model:
                inner.forward = OwnForward(inner)  # beneath an adapter
            model.forward = TreeForward(self, model, head)
        self._head = heads[0]
        if trainer.accelerator.num_processes > 1:
            settle = _weakly(self._before_step)
            register_optimizer_step_pre_hook(lambda optimizer, _args, _kwargs: settle(optimizer))

    def _engine(self, model: nn.Module, head: FusedHead) -> TreeEngine:
        key = (id(model), head.temperature)
        if key not in self._engines:
            training = model.training
            model.train()  # so that checks see active dropout
            try:
                self._engines[key] = TreeEngine(model, budget=self.budget, temperature=head.temperature)
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
        with step.micro_batch():
            yield
        self.steps.drop_failed()
        last = self.trainer.accelerator.sync_gradients
        self.settle(everything=last, average=last)
        if last:
            step.end()
            self.gains.end_step()

    def settle(self, *, everything: bool = True, average: bool | None = None) -> None:
        """Run gradients that wait through their trees.

        Args:
            everything: also trees that hold rows of micro-batches to come, which are then scored again.
            average: average gradients over the processes, unless these have been; None: as DistributedDataParallel
                does, if this is the last micro-batch.
        """
        engine, step = self._engine(self.wrapped, self._head), self.steps.step
        average = self.trainer.accelerator.sync_gradients if average is None else average
        if engine.ranks.alone or not average:
            self._settle(everything)
        elif self.steps.gradients_wait or gradient_versions(engine.parameters) != step.averaged:
            with engine.ranks.together("the backward of the step's trees"):
                self._settle(everything)
            engine.sharing.average_gradients(engine.parameters)
            step.averaged = gradient_versions(engine.parameters)

    def _settle(self, everything: bool) -> None:
        for scored in self.steps.settle(everything=everything):
            self.gains.add_backward(scored)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Average what has not been averaged, such as the gradients of a rank that skipped its last micro-batch."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(p) in stepped for p in self.model.parameters()):
            if self.steps.gradients_wait or not self.steps.step.complete:
                self.settle(average=True)
            self.steps.step.complete = False

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
        plain = {"forward": self.model.forward.plain} if logits and self.seam == "loss" else {}
        with replaced(self.steps.step, training=False), replaced(self.model, **plain):
            yield

    # ---- The model's calls ----

    def answer(self, model: nn.Module, plain: Callable, head: FusedHead, args: tuple, kwargs: dict) -> Any:
        """The result of a call of the model's forward: from a tree if it asks for scores, else its own."""
        gradients = torch.is_grad_enabled()
        if not self._answers(args, kwargs):
            if self.in_loss and gradients and not args and RUN_KEYWORD not in kwargs:
                self.gains.add_call(kwargs)
            return plain(*args, **kwargs)
        unknown = sorted(key for key, value in kwargs.items() if key not in KNOWN_ARGUMENTS and value is not None)
        if unknown and not gradients:
            return plain(*args, **kwargs)
        if unknown:
            raise ValueError(
                f"the model is called with {', '.join(unknown)}, which is not known to be exact on a tree; leave it "
                "out of the batch, or train without share_prefixes"
            )
        rows = self._rows_of(kwargs)
        training = gradients and any(p.requires_grad for p in model.parameters())
        with self.trainer.accelerator.autocast():
            if training and self.check:
                self._check_first_step(model, plain, head, rows, kwargs)
            return self._scored(model, head, rows, kwargs, training)

    def _answers(self, args: tuple, kwargs: dict) -> bool:
        """Whether a call is answered from a tree: it asks for the trainer's scores and does not generate."""
        generates = kwargs.get("past_key_values") is not None
        if args or generates or RUN_KEYWORD in kwargs or kwargs.get("input_ids") is None:
            return False
        if self.seam == "fused":
            return bool(kwargs.get("fused_lm_head"))
        wanted = self.seam == "rewards" or kwargs.get("labels") is not None
        return self.in_loss and wanted

    def _check_first_step(self, model: nn.Module, plain: Callable, head: FusedHead, rows: Rows, kwargs: dict) -> None:
        """Compare a few rows with the plain model; all ranks stop if one of them does. See `FirstStep`."""
        ranks = self._engine(self.wrapped if model is self.model else model, head).ranks
        with ranks.together("the comparison in the first step"):
            chosen = rows_to_compare(rows.ids, rows.masks)
            if chosen:
                first = FirstStep(self._engine(model, head), kwargs, rows, self.seam, chosen)
                for timed in (False, True):
                    with first.plain_run(timed=timed):
                        first.backward_of_plain(plain(**first.batch))
                with first.tree_run():
                    first.backward_of_tree(*self._answered(model, head, first.batch))
                self.gains.once, self.gains.plain_rate = first.judge()
            compared = ranks.exchange(bool(chosen))
        self.check = not any(compared)  # compare the next batch if this one predicts nothing on any rank

    def _answered(self, model: nn.Module, head: FusedHead, batch: dict[str, Any]) -> tuple[Any, Tensor, Scored]:
        """The output that a call gets by itself, its scores as a batch, and what runs their backward."""
        rows, engine = self._rows_of(batch), self._engine(model, head)
        scores = TreeScores(0, [rows])
        with self._balanced(model, batch):
            scored = scores.scored = self._run(engine, head, scores)
        output = self._output(engine, scores, slice(0, len(rows.ids)), rows, batch)
        return output, rows.batch(scored.logprobs) if scored.rewards is None else output.logits, scored

    def _run(self, engine: TreeEngine, head: FusedHead, scores: TreeScores) -> Scored:
        if self.seam == "rewards":
            return engine.score(scores.tree, rewards=True)
        statistics = bool({"is_top1", "mean_logits", "log_sum_sq_probs"} & set(head.outputs))
        return engine.score(scores.tree, mask=scores.masks, entropies="entropy" in head.outputs, statistics=statistics)

    @contextmanager
    def _balanced(self, model: nn.Module, kwargs: dict) -> Iterator[bool]:
        """Inside the block, the configuration asks for the routers' auxiliary loss if the call does; yields whether.

        A call may ask for it even if the model's configuration does not.
        """
        config: Any = causal_lm(model).config.get_text_config()  # type: ignore[union-attr, operator]
        configured = getattr(config, "output_router_logits", False)
        balanced = bool(configured or kwargs.get("output_router_logits"))
        with replaced(config, **({} if balanced == configured else {"output_router_logits": True})):
            yield balanced

    def _scored(self, model: nn.Module, head: FusedHead, rows: Rows, kwargs: dict, training: bool) -> Any:
        engine = self._engine(self.wrapped if training and model is self.model else model, head)
        # A model with another adapter, with adapters disabled, or with other weights counts as another model.
        key = (
            id(model),
            tuple(switches_of(engine.model, engine.parameters).items()),
            sum(p._version for p in model.parameters()),
        )
        # Hooks of parameters see the gradient of every micro-batch.
        hooked = training and any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
        if training:
            self._settle(everything=False)  # several trees in a micro-batch would be alive at once
        with self._balanced(model, kwargs) as balanced:
            scores, own = self.steps.scores_for(key, rows, together=not (balanced or hooked))
            if scores.scored is None:
                started = self.gains.now() if training else 0.0
                scores.scored = self._run(engine, head, scores)
                if training:
                    scores.scored.deferral.settle = _weakly(self.settle)
                    self.gains.add(scores.scored, scores.tree, engine.model, started)
        if balanced and scores.scored.aux_loss is None and self.seam != "rewards":
            raise ValueError(
                "the trainer asks for the routers' auxiliary loss, but router_aux_loss_coef of the model's "
                "configuration is 0 or not known; set it to the trainer's own"
            )
        return self._output(engine, scores, own, rows, kwargs)

    def _output(self, engine: TreeEngine, scores: TreeScores, own: slice, rows: Rows, kwargs: dict) -> Any:
        """Return the output that the trainer gets for a call: scores of its own rows, in the shape of its batch."""
        scored = scores.scored
        assert scored is not None
        if scored.rewards is not None:
            rewards = self.steps.kept_by(scores, scored.rewards[own])
            return SequenceClassifierOutput(logits=rewards if rewards.dim() == 2 else rewards[:, None])  # type: ignore[arg-type]

        def batch(values: Sequence[Tensor] | None) -> Tensor | None:
            return None if values is None else rows.batch(values[own])

        log_probs = self.steps.kept_by(scores, rows.batch(scored.logprobs[own]))
        normaliser = kwargs.get("num_items_in_batch")
        if normaliser is None:
            normaliser = rows.wanted.sum().clamp(min=1 if self.seam == "fused" else 0)
        loss, aux = -log_probs.sum() / normaliser, scored.aux_loss
        if aux is not None:
            aux = self.steps.kept_by(scores, aux)
            loss = loss + engine.capabilities.auxiliary * aux
        if self.seam == "loss":
            return CausalLMOutput(loss=loss)
        from trl.trainer.utils import FusedCausalLMOutput

        is_top1, entropies = batch(scored.is_top1), batch(scored.entropies)
        return FusedCausalLMOutput(
            loss=loss,
            log_probs=log_probs,
            entropy=None if entropies is None else self.steps.kept_by(scores, entropies),
            log_sum_sq_probs=batch(scored.log_sum_sq_probs),
            mean_logits=batch(scored.mean_logits),
            is_top1=None if is_top1 is None else is_top1.bool(),
            label_mask=rows.wanted,
            aux_loss=aux,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state on which the next logs depend; the checkpoints of `SafeCheckpointsMixin` keep it."""
        return self.gains.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the logs of a stopped run."""
        self.gains.load_state_dict(state)


class OwnForward:
    """Stands for the forward that was set on one module: copies and pickles of the module have that of their class.

    What TRL sets would call, in a copy, the model that it was made for.
    """

    def __init__(self, module: nn.Module):
        self._module, self.plain = module, module.forward
        functools.update_wrapper(self, self.plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (self._module, "forward")  # a copy has no attributes yet, so this is the class's forward


class TreeForward(OwnForward):
    """Stands for the forward of a model, and answers calls for scores from a tree.

    It belongs to one model of one trainer. In copies and pickles of the model the plain forward takes its place.
    """

    def __init__(self, sharing: PrefixSharing, model: nn.Module, head: FusedHead):
        super().__init__(model)
        self._sharing, self._head = sharing, head
        self._replaces = vars(model).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._sharing.answer(self._module, self.plain, self._head, args, kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (
            super().__reduce__() if self._replaces is None or _is_fused(self._replaces) else (_same, (self._replaces,))
        )


def _same(forward: Any) -> Any:
    return forward


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The method, which does not keep its object alive; afterwards it does nothing."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := reference()) is not None:
            alive(*args)

    return call


# ---- Checks of the settings before training


def seam_of(trainer: Any) -> Seam:
    """How this trainer calls its model.

    Raises:
        ValueError: an unsupported trainer or version of TRL.
    """
    for kind in type(trainer).__mro__:
        if not kind.__module__.startswith("trl.") or kind.__name__ == "_BaseTrainer":
            continue
        import trl

        if not trl.__version__.startswith(f"{TRL_VERSION}."):
            raise ValueError(
                f"trl {trl.__version__} is installed; how its trainers call their model is known of {TRL_VERSION}: "
                f"pip install 'trl=={TRL_VERSION}.*'"
            )
        if kind.__name__ not in SEAM_OF_TRAINER:
            raise ValueError(f"{kind.__name__} of TRL is not known here; known are {', '.join(SEAM_OF_TRAINER)}")
        return SEAM_OF_TRAINER[kind.__name__]
    return "loss"


def check_trainer(trainer: Any, seam: Seam) -> None:
    """Refuse settings that cannot be exact.

    Raises:
        ValueError, UnsupportedModel: the message names the setting to change.
    """
    args, accelerator = trainer.args, trainer.accelerator
    distributed = str(accelerator.distributed_type.value)
    parallelism = getattr(args, "parallelism_config", None) or getattr(accelerator, "parallelism_config", None)
    images = getattr(trainer, "_is_vlm", False) or getattr(trainer, "_is_vision_dataset", False)
    offloads = getattr(args, "activation_offloading", False)
    # TRL sets compute_loss_func to a string that only tells the Trainer not to scale its loss.
    refusals: dict[str, Any] = {
        f"distributed_type={distributed}; launch one process or DistributedDataParallel, without DeepSpeed, FSDP or "
        "Megatron (with FSDP2: recorded rows in tt.TreeTrainer, or a loop with tt.TreeEngine)": distributed
        not in ("NO", "MULTI_CPU", "MULTI_GPU"),
        f"torch.nn.DataParallel over {args.n_gpu} GPUs; launch one process for each with torchrun": args.n_gpu > 1,
        "fp16=True and its gradient scaler; set bf16=True instead": args.fp16 or accelerator.scaler is not None,
        "torch_compile=True, since the attention is switched at every call; set it to False": args.torch_compile,
        "use_liger_kernel=True, which replaces the model's layers; set it to False": args.use_liger_kernel,
        f"neftune_noise_alpha={args.neftune_noise_alpha}: a shared token would get one noise where every row has its "
        "own; set it to None": args.neftune_noise_alpha,
        f"label_smoothing_factor={args.label_smoothing_factor}, which needs the probabilities of all tokens; set it "
        "to 0": args.label_smoothing_factor,
        "model_init, which makes another model later; give the trainer a model": trainer.model_init is not None,
        "compute_loss_func: compute_loss_func is given logits, which are not computed; leave it out, or override "
        "compute_loss of a TRL trainer, which reads log-probabilities": callable(trainer.compute_loss_func),
        "activation_offloading=True: the tree's backward comes after the trainer's; bound memory by budget=": offloads,
        "images or a processor; use a text model with its tokenizer": images,
        "parallelism_config: context, sequence and tensor parallelism cut rows apart; leave it out": parallelism,
        "a model that is sharded over processes; train it with tt.TreeTrainer": is_sharded(trainer.model),
        "a tensor-parallel model (tp_plan), which has not been verified here; take tt.TreeEngine in a loop of your "
        "own": (getattr(causal_lm(trainer.model), "_tp_size", None) or 1) > 1,
        f"optim={args.optim}, which updates weights within the trainer's backward, before the tree's; take "
        "another": "lomo" in args.optim or "layerwise" in args.optim,
    }
    for reason, refused in refusals.items():
        if refused:
            raise ValueError(f"share_prefixes cannot be exact with {reason}")
    if seam != "loss":
        return
    kinds = [kind for kind in type(trainer).__mro__ if not kind.__module__.startswith(HANDING_ON)]
    if next(kind for kind in kinds if "compute_loss" in vars(kind)) is not Trainer:
        raise ValueError(
            f"{type(trainer).__name__} overrides compute_loss, whose calls of the model are not known here; derive it "
            "from one of TRL's trainers, or use tt.TreeTrainer"
        )
    lm = causal_lm(trainer.model)
    if (kind := getattr(lm, "loss_type", None)) not in ("ForCausalLM", None):  # None is the cross-entropy too
        raise UnsupportedModel(
            f"{type(lm).__name__} has loss_type={kind}; with a plain Trainer, give a causal LM whose loss is the "
            "cross-entropy (ForCausalLM)"
        )
