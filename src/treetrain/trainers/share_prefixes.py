"""One line that makes a transformers or TRL trainer compute shared prefixes once, with the trainer's own losses.

The trainers ask their model for the log-probabilities of a batch and compute the loss from them. Here the model's
forward answers these calls: it recovers the rows of the batch, scores them as a prefix tree (`TreeEngine.score`) and
hands out leaves in the shape that the trainer expects. The trainer's own backward ends in the leaves; what has arrived
there goes through the tree once, before `Accelerator.backward` returns. No loss, metric or schedule is copied.
"""

import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutput, SequenceClassifierOutput

from treetrain.engine.engine import TreeEngine
from treetrain.engine.planning import formula_cost
from treetrain.engine.switches import switches_of
from treetrain.models.capability import causal_lm
from treetrain.models.switch import RUN_KEYWORD
from treetrain.planning.budget import Bytes
from treetrain.planning.cost import ModelShape
from treetrain.trainers import async_grpo
from treetrain.trainers.accumulation import RowScores, StepScores
from treetrain.trainers.batch_rows import Rows, rows_of, tree_of
from treetrain.trainers.first_step import compare_with_plain, text_config
from treetrain.trainers.refusals import check_trainer, seam_of
from treetrain.tree.stats import linear_work, tree_work
from treetrain.tree.token_tree import TokenTree

logger = logging.getLogger(__name__)
T = TypeVar("T", bound=Trainer)
LITTLE = 0.05
"""A share of tokens that is not worth a tree."""
AnyRows = Rows | async_grpo.PackedTreeRows

_UNDERSTOOD = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "labels",
    "use_cache",
    "return_dict",
    "output_router_logits",
    "num_items_in_batch",
    "fused_lm_head",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
    *async_grpo.KEYWORDS,
}
"""Keyword arguments of a forward whose meaning for a row is known here."""


def share_prefixes(trainer: T, budget: int | str | Bytes | None = None, *, check: bool = True) -> T:
    """Make a trainer compute every shared prefix of a batch once, in forward and backward, and return it.

    Losses, gradients, metrics and evaluation stay the trainer's own. Rows share within one optimizer step on one
    process, over its micro-batches; `PrefixGroupSampler` brings them there.

    Args:
        trainer: a `transformers.Trainer` with a causal LM, or an `SFTTrainer`, `DPOTrainer`, `KTOTrainer`,
            `GRPOTrainer`, `RLOOTrainer`, `RewardTrainer` or `AsyncGRPOTrainer` of TRL 1.16, after construction and
            before ``train()``.
        budget: tokens whose graph is alive at once, or bytes ("8GiB") of peak memory above model, gradients and
            optimiser state; None fits to the memory that is free.
        check: compare a few rows of the first training batch with the model's plain forward and backward, log the
            difference, and stop if it is too large.

    Returns:
        the same object; its class is now a subclass of the one it had, with `SharePrefixesMixin`.

    Raises:
        UnsupportedModel: the model would not be exact on a tree.
        ValueError: a setting of the trainer that cannot be exact, with the one to change; a version of TRL that is
            not known here.
    """
    if isinstance(trainer, SharePrefixesMixin):
        raise ValueError("this trainer shares prefixes already; call share_prefixes once")
    if not isinstance(trainer, Trainer):
        raise TypeError(f"share_prefixes takes a transformers.Trainer or a subclass, not a {type(trainer).__name__}")
    sharing = PrefixSharing(trainer, budget, check)
    plain = type(trainer)
    trainer.__class__ = type(plain.__name__, (SharePrefixesMixin, plain), {"__doc__": plain.__doc__})
    trainer.prefix_sharing = sharing  # type: ignore[attr-defined]
    return trainer


class SharePrefixesMixin:
    """Shared prefixes for subclasses of trainers: ``class MyTrainer(SharePrefixesMixin, DPOTrainer)``.

    Args:
        budget, check: see `share_prefixes`; all other arguments are the trainer's.
    """

    prefix_sharing: "PrefixSharing"

    def __init__(self, *args: Any, budget: int | str | Bytes | None = None, check: bool = True, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.prefix_sharing = PrefixSharing(self, budget, check)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's micro-batches of the next optimizer step, which are scored as one tree where they share."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self.prefix_sharing.steps.begin_step(batches)
        return batches, num_items

    def _get_per_token_logps_and_entropies(self, *args: Any, batch_size: int | None = None, **kwargs: Any) -> Any:
        """GRPO's and RLOO's scores, of all rows at once: the engine's budget bounds memory, not the rows of a call."""
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """The trainer's training step; its backward goes on through the tree."""
        with self.prefix_sharing.training_step():
            return super().training_step(model, *args, **kwargs)  # type: ignore[misc]

    def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The trainer's loss, from what the tree's execution gives."""
        with self.prefix_sharing.loss_of(model) as inner:
            return super().compute_loss(inner, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """The trainer's evaluation; where logits are wanted, the model makes them row by row."""
        with self.prefix_sharing.evaluation(logits=not prediction_loss_only):
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The trainer's logs and, at training steps, what was shared since the last ones."""
        if "loss" in logs:
            logs.update(self.prefix_sharing.take_logs())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


@dataclass
class _Counts:
    """What is logged, summed since the last logs."""

    flat: int = 0
    unique: int = 0
    recomputed: int = 0
    parts: int = 0
    batches: int = 0
    row_flops: float = 0.0
    tree_flops: float = 0.0


class PrefixSharing:
    """What a trainer that shares prefixes carries: engines, the scores whose backward is to come, and counts."""

    def __init__(self, trainer: Any, budget: int | str | Bytes | None, check: bool):
        self.seam = seam_of(trainer)
        check_trainer(trainer, self.seam)
        self.trainer, self.budget, self.check = trainer, budget, check
        self.model: nn.Module = trainer.model
        self.wrapped = self.model
        self._engines: dict[tuple[int, float], TreeEngine] = {}
        self.steps = StepScores(trainer, self._rows_of)
        self._waits = False  # whether scores have been handed out since the last backward
        self._shapes: dict[nn.Module, ModelShape | None] = {}
        self._counts, self._once = _Counts(), {}
        self._plain_rate: float | None = None  # FLOP/s of the plain forward and backward over a few rows
        self._batches, self._advised = 0, False
        self._watch: tuple[float, float] | None = None
        self._in_loss = self._logits_wanted = False
        if getattr(self.model.config, "_attn_implementation", None) == async_grpo.ATTENTION:
            self.model.set_attn_implementation("sdpa")  # type: ignore[operator]
        models = [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
        heads = [fused_head(model) for model in models]
        for model, head in zip(models, heads):
            self._engine(model, head)  # refuses what cannot be exact, before anything is changed
        for model, head in zip(models, heads):
            self._answer_for(model, head)

    def _answer_for(self, model: nn.Module, head: "FusedHead") -> None:
        """Let the model's forward answer calls for log-probabilities from a tree, and all others as before."""
        plain = model.forward

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(model, plain, head, args, kwargs)

        model.forward = forward

    def _engine(self, model: nn.Module, head: "FusedHead") -> TreeEngine:
        key = (id(model), head.temperature)
        if key not in self._engines:
            with _training_mode(model):
                self._engines[key] = TreeEngine(model, budget=self.budget, temperature=head.temperature)
        return self._engines[key]

    # ---- what the trainer's methods run within

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Within, `Accelerator.backward` also runs the tree's."""
        accelerator, self._waits = self.trainer.accelerator, False
        self.steps.next_micro_batch()
        plain = accelerator.backward

        def backward(loss: Tensor, **kwargs: Any) -> None:
            plain(loss, **kwargs)
            self._backward(accelerator.sync_gradients)

        accelerator.backward = backward
        try:
            yield
        finally:
            del accelerator.backward
        if self._waits:
            raise RuntimeError(
                "the training step ended before Accelerator.backward was called, so its gradients have not reached the "
                "model; call self.accelerator.backward(loss) where the trainer calls loss.backward()"
            )

    @contextmanager
    def loss_of(self, model: nn.Module) -> Iterator[nn.Module]:
        """Within, calls of the model that is yielded are answered from the tree; `model` may be wrapped."""
        inner = self.trainer.accelerator.unwrap_model(model)
        if inner is not self.model:
            raise RuntimeError(
                "the trainer trains another model than it had when share_prefixes was called; call share_prefixes when "
                "the trainer has its last one"
            )
        before, self._in_loss, self.wrapped = self._in_loss, True, model
        try:
            yield inner
        finally:
            self._in_loss = before

    @contextmanager
    def evaluation(self, *, logits: bool) -> Iterator[None]:
        """Within, logits may be wanted, which only the model itself gives."""
        self.steps.begin_step([])  # scores of the last step are those of other weights
        before, self._logits_wanted = self._logits_wanted, logits
        try:
            yield
        finally:
            self._logits_wanted = before

    # ---- the model's calls

    def _forward(self, model: nn.Module, plain: Callable, head: "FusedHead", args: tuple, kwargs: dict) -> Any:
        if not self._is_asked_for(args, kwargs):
            self._check_synchronised(model, kwargs)
            return plain(*args, **kwargs)
        unknown = sorted(key for key, value in kwargs.items() if key not in _UNDERSTOOD and value is not None)
        if unknown and not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        if unknown:
            raise ValueError(
                f"the model is called with {', '.join(unknown)}, which is not known to be exact on a tree; leave it "
                "out of the batch, or train without share_prefixes"
            )
        rows = self._rows_of(kwargs)
        training = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
        with self.trainer.accelerator.autocast():
            if training and self.check:
                self._compare(self._engine(model, head), plain, rows)
            return self._scored(model, head, rows, kwargs, training)

    def _check_synchronised(self, model: nn.Module, kwargs: dict) -> None:
        """A call that takes gradients past the tree would also take them past DistributedDataParallel."""
        live = self._in_loss and model is self.model and torch.is_grad_enabled() and RUN_KEYWORD not in kwargs
        if live and self.trainer.accelerator.num_processes > 1:
            raise ValueError(
                f"compute_loss calls the model with {', '.join(sorted(kwargs))}, which is not answered from a tree; "
                "on several processes its gradients would not be synchronised; train without share_prefixes"
            )

    def _rows_of(self, kwargs: dict) -> AnyRows:
        if "tree_kv_index" in kwargs:
            return async_grpo.rows_of_packed_tree(kwargs)
        return rows_of(kwargs, text_config(self.model) if self.seam == "rewards" else None)

    def _compare(self, engine: TreeEngine, plain: Callable, rows: AnyRows) -> None:
        compared = compare_with_plain(engine, plain, rows.ids, rows.masks, seam=self.seam)
        if compared is None:
            return  # nothing is predicted in this batch
        self.check = False
        self._once = {"tree/score_difference": compared.scores, "tree/gradient_difference": compared.gradients}
        few = tree_of(compared.ids, compared.masks)
        if (shape := self._shape(engine)) is not None:
            self._plain_rate = shape.flops(*linear_work(few, shape.attention_ranges)) / compared.seconds

    def _is_asked_for(self, args: tuple, kwargs: dict) -> bool:
        """Whether a call wants what a tree gives: it comes from the trainer's loss, and not from generation."""
        if (
            args
            or RUN_KEYWORD in kwargs
            or kwargs.get("input_ids") is None
            or kwargs.get("past_key_values") is not None
        ):
            return False
        if self.seam == "fused":
            return bool(kwargs.get("fused_lm_head"))
        wanted = self.seam == "rewards" or kwargs.get("labels") is not None
        return self._in_loss and wanted and not (self._logits_wanted and self.seam == "loss")

    def _scored(self, model: nn.Module, head: "FusedHead", rows: AnyRows, kwargs: dict, training: bool) -> Any:
        engine = self._engine(self.wrapped if training and model is self.model else model, head)

        def run(ids: list[np.ndarray], masks: list[np.ndarray]) -> Any:
            if training:
                self._start_watch()
            tree = tree_of(ids, masks)
            if self.seam == "rewards":
                scored = engine.score(tree, rewards=True)
            else:
                options = {"entropies": "entropy" in head.outputs, "statistics": head.wants_statistics}
                scored = engine.score(tree, mask=masks, **options)
            if training:
                self._count(scored, tree, self._shape(engine))
            return scored

        # A disabled adapter, or another one, makes it another model.
        key = id(model), tuple(switches_of(engine).items())
        with _asked_for_balance(model, kwargs) as balanced:
            scores = self.steps.score(key, rows, run, together=not balanced)
            if balanced and scores.aux_loss is None and self.seam != "rewards":
                raise ValueError(
                    "the trainer asks for the routers' auxiliary loss, but router_aux_loss_coef of the model's "
                    "configuration is 0 or not known; set it to the trainer's own"
                )
        self._waits |= training
        if self.seam == "rewards":
            rewards = scores.rewards
            assert rewards is not None
            return SequenceClassifierOutput(logits=rewards if rewards.dim() == 2 else rewards[:, None])
        return self._output(engine.capabilities.auxiliary, rows, scores, kwargs)

    def _output(self, aux_coefficient: float, rows: AnyRows, scored: RowScores, kwargs: dict) -> Any:
        log_probs = rows.batch(scored.logprobs)
        assert log_probs is not None
        normaliser = kwargs.get("num_items_in_batch")
        if normaliser is None:
            normaliser = rows.wanted.sum().clamp(min=1 if self.seam == "fused" else 0)
        loss, aux = -log_probs.sum() / normaliser, scored.aux_loss
        if aux is not None:
            loss = loss + aux_coefficient * aux
        if self.seam == "loss":
            return CausalLMOutput(loss=loss)
        from trl.trainer.utils import FusedCausalLMOutput

        is_top1 = rows.batch(scored.is_top1)
        return FusedCausalLMOutput(
            loss=loss,
            log_probs=log_probs,
            entropy=rows.batch(scored.entropies),
            log_sum_sq_probs=rows.batch(scored.log_sum_sq_probs),
            mean_logits=rows.batch(scored.mean_logits),
            is_top1=None if is_top1 is None else is_top1.bool(),
            label_mask=rows.wanted,
            aux_loss=aux,
        )

    def _backward(self, sync: bool) -> None:
        self._waits = False
        for scored in self.steps.backward(sync=sync):
            self._counts.recomputed += scored.recomputed_tokens
            self._stop_watch()

    # ---- logs

    def _shape(self, engine: TreeEngine) -> ModelShape | None:
        if engine.model not in self._shapes:
            cost = formula_cost(engine.model)
            self._shapes[engine.model] = None if cost is None else cost.shape
        return self._shapes[engine.model]

    def _count(self, scored: Any, tree: TokenTree, shape: ModelShape | None) -> None:
        counts = self._counts
        counts.flat += scored.flat_tokens
        counts.unique += scored.unique_tokens
        counts.parts += scored.parts
        counts.batches += 1
        if shape is not None:
            counts.row_flops += shape.flops(*linear_work(tree, shape.attention_ranges))
            counts.tree_flops += shape.flops(*tree_work(tree, shape.attention_ranges))

    def _start_watch(self) -> None:
        """Time the second batch: the first also warms up, and a GPU is waited for at both ends."""
        self._batches += 1
        if self._batches == 2 and self._plain_rate is not None:
            self._wait()
            self._watch = time.perf_counter(), self._counts.row_flops

    def _stop_watch(self) -> None:
        if self._watch is not None and self._plain_rate is not None:
            self._wait()
            begin, row_flops = self._watch
            plain_seconds = (self._counts.row_flops - row_flops) / self._plain_rate
            self._once["tree/measured_speedup"] = plain_seconds / (time.perf_counter() - begin)
            self._watch = None

    def _wait(self) -> None:
        if self.trainer.accelerator.device.type == "cuda":
            torch.cuda.synchronize()

    def take_logs(self) -> dict[str, float]:
        """What was shared since the last call, of this process."""
        counts, self._counts = self._counts, _Counts()
        logs, self._once = self._once, {}
        if counts.batches:
            logs["tree/overlap"] = 1 - counts.unique / max(counts.flat, 1)
            self._advise(logs["tree/overlap"])
            logs["tree/parts"] = counts.parts / counts.batches
            logs["tree/recomputed_tokens"] = counts.recomputed / counts.batches
        if counts.tree_flops:
            logs["tree/ideal_speedup"] = counts.row_flops / counts.tree_flops
        return logs

    def _advise(self, overlap: float) -> None:
        if overlap < LITTLE and not self._advised:
            self._advised = True
            logger.warning(
                "the rows of a step share %.0f%% of their tokens, so sharing prefixes gains next to nothing; bring "
                "rows with a common prefix into one step (treetrain.PrefixGroupSampler), or make steps larger",
                100 * overlap,
            )


class FusedHead(NamedTuple):
    """How a trainer's model was asked to score labels."""

    temperature: float = 1.0
    outputs: tuple[str, ...] = ("log_probs",)

    @property
    def wants_statistics(self) -> bool:
        """Whether anything but log-probabilities and entropies is read."""
        return bool({"is_top1", "mean_logits", "log_sum_sq_probs"} & set(self.outputs))


def fused_head(model: nn.Module) -> FusedHead:
    """The settings that TRL's `add_fused_lm_head` was given for this model; the defaults where it was not called."""
    forward: Any = causal_lm(model).forward
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        if "cast_lm_head_to_fp32" in getattr(function, "__code__", _NO_CODE).co_freevars:
            found = inspect.getclosurevars(function).nonlocals
            if found["cast_lm_head_to_fp32"]:
                raise ValueError("cast_lm_head_to_fp32=True: the head runs in the model's dtype here; set it to False")
            return FusedHead(float(found["temperature"]), tuple(found["outputs"]))
        forward = getattr(forward, "__wrapped__", None)
    return FusedHead()


_NO_CODE = (lambda: None).__code__


@contextmanager
def _asked_for_balance(model: nn.Module, kwargs: dict) -> Iterator[bool]:
    """Whether the routers' auxiliary loss is wanted, which a call may ask for beside the model's configuration."""
    config = text_config(model)
    before = getattr(config, "output_router_logits", False)
    wanted = bool(before or kwargs.get("output_router_logits"))
    if wanted == before:
        yield wanted
        return
    config.output_router_logits = True
    try:
        yield True
    finally:
        config.output_router_logits = before


@contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode, where dropout shows, and every module back into its own afterwards."""
    before = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
