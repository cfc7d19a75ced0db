"""The kinds of output that trainers read of their models. Each kind is a class.

An `Output` says which calls ask for scores (`cases`), which rows and scores they are (`rows`, `score`), how the trainer
gets them (`answer`), and what the comparison of the first step reads of the plain model (`plain`). Another kind of
trainer is another class, in `OUTPUTS`.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from transformers import Trainer
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import ModelOutput

from treetrain.check.row_scores import POSITIONS, scores_of_logits
from treetrain.core.errors import UnsupportedModel
from treetrain.core.head.lm_head import zero_of
from treetrain.core.hf.capability import causal_lm
from treetrain.core.hf.tree_mode import replaced
from treetrain.engine import TreeEngine
from treetrain.trainers.batches import IGNORED, ModelInputs, Rows, rows_of
from treetrain.trainers.calls import Asks, Call
from treetrain.trainers.patches import FUSED_SETTINGS, OwnForward, TreeForward, fused_forward
from treetrain.trainers.settings import classes_of_trl

if TYPE_CHECKING:
    from treetrain.core.engine.score import Scored
    from treetrain.core.planning.cost import ModelCounts
    from treetrain.trainers.step_scores import TreeScores

FUSED_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""The values of each token that TRL's fused head may compute."""
FUSED_TRAINERS = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer", "AsyncGRPOTrainer")
"""TRL's trainers whose models must have its fused head. Others are taken by what their models have."""
ASYNC_GRPO_ATTENTION = "tree_fa3"
"""The attention implementation that TRL sets on the model of an `AsyncGRPOTrainer`; its kernel is for Hopper GPUs."""
TRL_TILE, TRL_TILE_BYTES = 32_768, 36
"""The most tokens of the vocabulary in a tile of TRL's head, and bytes for each logit of a tile in its backward when
plain torch operations compute it: the tile, eight copies in float32 and a mask (trl/kernels/chunked_logprob.py)."""


class Question(NamedTuple):
    """A call that asks for scores."""

    forward: OwnForward
    output: "Output"
    inputs: ModelInputs
    """Its arguments, with ``labels`` in place of ``shift_labels``."""
    rows: Rows
    shifted: bool = False
    """Whether it has ``shift_labels``: its output then has a column for what follows the last token too."""
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    """Makes the context in which the model answers, such as that of one adapter."""


class Answer(NamedTuple):
    """The scores of a call's rows, of which its output is made."""

    asked: Question
    scored: "Scored"
    """The score of a tree, which may hold rows of other micro-batches too."""
    own: slice
    """The rows of this call among those of the tree."""
    keep: Callable[[Tensor], Tensor]
    """Ties a value that is computed from the scores to their tree, until a backward comes."""
    coefficient: float
    """The coefficient of the routers' auxiliary loss."""

    def batch(self, values: Sequence[Tensor] | None) -> Tensor | None:
        """Values of the tree's rows, as [B, L - 1] for the rows of this call."""
        return None if values is None else self.asked.rows.batch(values[self.own])

    @property
    def scores(self) -> Tensor:
        """Log-probabilities [B, L - 1], 0 where nothing is predicted; or rewards [B, c]."""
        rewards = self.scored.rewards
        if rewards is None:
            return self.asked.rows.batch(self.scored.logprobs[self.own])
        return rewards[self.own] if rewards.dim() == 2 else rewards[self.own, None]

    def loss(self, logprobs: Tensor, least: int) -> tuple[Tensor, Tensor | None]:
        """The loss that the model would compute, a mean over `least` or more; and the routers' part of it."""
        normaliser = self.asked.inputs.get("num_items_in_batch")
        if normaliser is None:
            normaliser = self.asked.rows.wanted.sum().clamp(min=least)
        loss, auxiliary = -logprobs.sum() / normaliser, self.scored.aux_loss
        if auxiliary is not None:
            auxiliary = self.keep(auxiliary)
            loss = loss + self.coefficient * auxiliary
        return loss, auxiliary


class Compared(NamedTuple):
    """The parts of the plain model's output that the first step compares."""

    scores: Tensor | None
    """Log-probabilities [B, L - 1], 0 where nothing is predicted, or rewards [B, c]; None if the model gives none."""
    loss: Tensor | None
    """None if the trainer computes its own."""
    zero: Tensor
    """A zero whose backward reaches every weight."""


@dataclass(frozen=True)
class Output(ABC):
    """A kind of output that a trainer reads of its model; this class has what all kinds share."""

    temperature: float = 1.0
    """Divides the logits before the softmax."""
    has_loss: ClassVar[bool] = False
    """Whether the trainer takes the model's loss, so that an evaluation may read logits beside it."""
    trainers: ClassVar[Collection[str]] = ()
    """The names of the classes of TRL that read it."""
    balances: ClassVar[bool] = True
    """Whether the routers' auxiliary loss is part of it where the model's configuration or the call asks for it."""

    @classmethod
    def of(cls, model: nn.Module) -> "Output":
        """The output that this model is asked for. Raises ValueError for settings that a tree cannot follow."""
        return cls()

    @abstractmethod
    def cases(self, call: Call) -> Sequence[tuple[object, Asks]]:
        """The first case that holds for a call. If none does, the call asks for the model's own output."""

    def asks(self, call: Call) -> Asks:
        """Tell what a call asks the model for."""
        cases = (
            (call.generates, Asks.OUTPUT),  # token by token: no rows to score
            (call.reads_logits, Asks.OUTPUT),  # the plain forward gives the loss beside them
            *self.cases(call),
        )
        return next((asks for holds, asks in cases if holds), Asks.OUTPUT)

    def rows(self, inputs: ModelInputs, model: nn.Module) -> Rows:
        """The rows in the arguments of a call."""
        return rows_of(inputs, model=model)

    @contextmanager
    def balanced(self, model: nn.Module, inputs: ModelInputs) -> Iterator[bool]:
        """Inside the block, the configuration asks for the routers' auxiliary loss if the call does; yields whether.

        A call may ask for it even if the model's configuration does not.
        """
        config = causal_lm(model).config.get_text_config()
        configured = bool(getattr(config, "output_router_logits", False))
        balanced = bool(self.balances and (configured or inputs.get("output_router_logits")))
        with replaced(config, **({} if balanced == configured else {"output_router_logits": balanced})):
            yield balanced

    def score(self, engine: TreeEngine, scores: "TreeScores") -> "Scored":
        """Score a tree."""
        return engine.score(scores.tree, mask=scores.masks)

    @abstractmethod
    def answer(self, answer: Answer) -> Any:
        """The output that the trainer gets."""

    @abstractmethod
    def plain(self, forward: Callable[..., Any], batch: ModelInputs) -> Compared:
        """Run the plain model, as the trainer runs it, on a batch that has ``labels``."""

    def head_bytes(self, counts: "ModelCounts", device: torch.device) -> float:
        """Bytes for each token that the plain model's head needs for its forward and backward.

        Here: logits, their log-softmax in float32, and the gradients of both.
        """
        logit, wide = counts.dtype_bytes, counts.wide_bytes
        return counts.vocab * (3 * wide + (2 * logit if logit < wide else 0))


class LossOutput(Output):
    """``outputs.loss`` of a plain Trainer: the cross-entropy of the labels. Or a loss of the user's own."""

    has_loss = True

    def cases(self, call: Call) -> Sequence[tuple[object, Asks]]:
        return (
            (call.in_loss and call.has_labels, Asks.SCORES),  # the model computes the loss
            (call.in_loss and call.loss_follows, Asks.OUTPUT_OR_SCORES),  # the user does, from what is not known yet
        )

    def answer(self, answer: Answer) -> "TreeOutput":
        loss, auxiliary = answer.loss(answer.keep(answer.scores), least=0)
        assert isinstance(answer.asked.forward, TreeForward)
        return TreeOutput(answer.asked.forward, answer.asked.inputs, loss, auxiliary)

    def plain(self, forward: Callable[..., Any], batch: ModelInputs) -> Compared:
        output = forward(**batch)
        scores = None if output.logits is None else label_logprobs(output.logits.detach(), batch["labels"])
        return Compared(scores, output.loss, zero_of(output.loss if output.logits is None else output.logits))


@dataclass(frozen=True)
class FusedOutput(Output):
    """Log-probabilities of labels, and more of each token, as TRL's `add_fused_lm_head` gives them."""

    trainers = FUSED_TRAINERS
    outputs: tuple[str, ...] = ("log_probs",)
    """The outputs that it computes, among `FUSED_OUTPUTS`."""

    @classmethod
    def of(cls, model: nn.Module) -> "FusedOutput":
        """Read the settings from TRL's closure around the model's forward, and replace a kernel for Hopper GPUs.

        Raises:
            ValueError: there is none, or it has settings that are not known here.
        """
        import trl
        from trl.trainer import utils

        from treetrain.trainers.relied_on import TESTED

        forward = fused_forward(model)
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
        if getattr(model.config, "_attn_implementation", None) == ASYNC_GRPO_ATTENTION:
            model.set_attn_implementation("sdpa")  # type: ignore[operator]
        return cls(float(settings["temperature"]), outputs)

    def cases(self, call: Call) -> Sequence[tuple[object, Asks]]:
        return ((not call.args and call.inputs.get("fused_lm_head"), Asks.SCORES),)  # wherever TRL asks its head

    def score(self, engine: TreeEngine, scores: "TreeScores") -> "Scored":
        statistics = bool({"is_top1", "mean_logits", "log_sum_sq_probs"} & {*self.outputs})
        entropies = "entropy" in self.outputs
        return engine.score(scores.tree, mask=scores.masks, entropies=entropies, statistics=statistics)

    def answer(self, answer: Answer) -> Any:
        from trl.trainer.utils import FusedCausalLMOutput

        scored, log_probs = answer.scored, answer.keep(answer.scores)
        loss, auxiliary = answer.loss(log_probs, least=1)
        is_top1, entropies = answer.batch(scored.is_top1), answer.batch(scored.entropies)
        output = FusedCausalLMOutput(
            loss=loss,
            log_probs=log_probs,
            entropy=None if entropies is None else answer.keep(entropies),
            log_sum_sq_probs=answer.batch(scored.log_sum_sq_probs),
            mean_logits=answer.batch(scored.mean_logits),
            is_top1=None if is_top1 is None else is_top1.bool(),
            label_mask=answer.asked.rows.wanted,
            aux_loss=auxiliary,
        )
        for name in (*FUSED_OUTPUTS, "label_mask") if answer.asked.shifted else ():
            if (value := getattr(output, name)) is not None:
                setattr(output, name, nn.functional.pad(value, (0, 1)))
        return output

    def plain(self, forward: Callable[..., Any], batch: ModelInputs) -> Compared:
        scores = forward(**batch).log_probs
        return Compared(scores, None, zero_of(scores))

    def head_bytes(self, counts: "ModelCounts", device: torch.device) -> float:
        """See `Output`. TRL's head works on tiles, in torch or by a kernel that needs no more than the tile."""
        from importlib.util import find_spec

        kernel = device.type in ("cuda", "xpu") and find_spec("triton") is not None
        return min(counts.vocab, TRL_TILE) * (counts.dtype_bytes if kernel else TRL_TILE_BYTES)


class RewardsOutput(Output):
    """``outputs.logits`` of a reward model: a number for each row."""

    trainers = ("RewardTrainer",)

    def cases(self, call: Call) -> Sequence[tuple[object, Asks]]:
        return ((call.in_loss and not call.args, Asks.SCORES),)

    def rows(self, inputs: ModelInputs, model: nn.Module) -> Rows:
        return rows_of(inputs, rewards=True, model=model)

    def score(self, engine: TreeEngine, scores: "TreeScores") -> "Scored":
        return engine.score(scores.tree, rewards=True)

    def answer(self, answer: Answer) -> SequenceClassifierOutput:
        return SequenceClassifierOutput(logits=answer.keep(answer.scores))  # type: ignore[arg-type]

    def plain(self, forward: Callable[..., Any], batch: ModelInputs) -> Compared:
        scores = forward(**batch).logits
        return Compared(scores, None, zero_of(scores))

    def head_bytes(self, counts: "ModelCounts", device: torch.device) -> float:
        return 0.0


@dataclass(frozen=True)
class TokensOutput(Output):
    """Log-probabilities of labels and of given ids, and entropies, for `treetrain.token_logprobs` in any loss."""

    entropy: bool = False
    balances = False

    def cases(self, call: Call) -> Sequence[tuple[object, Asks]]:
        return ((True, Asks.LOGPROBS),)

    def score(self, engine: TreeEngine, scores: "TreeScores") -> "Scored":
        asked = [ids for rows in scores.batches for ids in rows.asked]
        return engine.score(scores.tree, mask=scores.masks, entropies=self.entropy, ids=asked or None)

    def answer(self, answer: Answer) -> tuple[Tensor, Tensor | None, Tensor | None]:
        scored, entropies = answer.scored, answer.batch(answer.scored.entropies)
        of_ids = None if scored.id_logprobs is None else answer.asked.rows.at_ids(scored.id_logprobs[answer.own])
        entropies, of_ids = (None if x is None else answer.keep(x) for x in (entropies, of_ids))
        return answer.keep(answer.scores), entropies, of_ids

    def plain(self, forward: Callable[..., Any], batch: ModelInputs) -> Compared:
        logits = forward(**{name: value for name, value in batch.items() if name != "labels"}).logits
        scores = label_logprobs(logits, batch["labels"], self.temperature)
        return Compared(scores, None, zero_of(scores))


OUTPUTS: tuple[type[Output], ...] = (RewardsOutput, FusedOutput)
"""The kinds that trainers of TRL read."""


def kind_of_output(trainer: Trainer) -> type[Output]:
    """The kind of output that this trainer reads of its model.

    Raises:
        ValueError: a trainer of TRL that asks its model for something else than the fused head's scores, or rewards.
        UnsupportedModel: a plain trainer's model has another loss than the cross-entropy.
    """
    assert trainer.model is not None
    names = classes_of_trl(trainer)
    if names:
        for kind in OUTPUTS:
            if {*names} & {*kind.trainers}:
                return kind
        if fused_forward(trainer.model) is not None:
            return FusedOutput
        if "AsyncDistillationTrainer" in names:
            raise ValueError(
                "AsyncDistillationTrainer of TRL calls its model's layers on packed rows within its loss, past the "
                "model's own forward, so no tree can answer; train on its teacher's ids (Trajectory.teacher_topk) with "
                "tt.losses.distill_topk"
            )
        raise ValueError(
            f"{names[0]} of TRL asks its model for logits, which no tree gives; share_prefixes takes RewardTrainer and "
            f"trainers of TRL whose model has its fused head, such as {', '.join(FUSED_TRAINERS)}. In a subclass whose "
            "compute_loss takes tt.token_logprobs(model, inputs) from a plain transformers.Trainer, prefixes are shared"
        )
    lm = causal_lm(trainer.model)
    loss_type = getattr(lm, "loss_type", None)  # None is the cross-entropy too
    if loss_type is not None and LOSS_MAPPING.get(loss_type) is not ForCausalLMLoss:
        raise UnsupportedModel(
            f"{type(lm).__name__} has loss_type={loss_type}; with a plain Trainer, give a causal LM whose loss is the "
            "cross-entropy (ForCausalLM)"
        )
    return LossOutput


def label_logprobs(
    logits: Float[Tensor, "B L V"], labels: Integer[Tensor, "B L"], temperature: float = 1.0
) -> Float[Tensor, "B _"]:
    """Log-probabilities of the labels' tokens [B, L - 1], 0 where there is no label; a few positions at a time."""
    logprobs = logits.new_zeros(labels[:, 1:].shape, dtype=torch.promote_types(logits.dtype, torch.float32))
    for row, column in zip(*(index.split(POSITIONS) for index in (labels[:, 1:] != IGNORED).nonzero(as_tuple=True))):
        logprobs[row, column], _ = scores_of_logits(logits[row, column], labels[row, column + 1], temperature)
    return logprobs


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
        self._evaluates, self._plain = not torch.is_grad_enabled() and forward.answers.steps.ranks.alone, None

    def _plain_output(self, name: str) -> Any:
        """The output of the plain model.

        Raises:
            RuntimeError: with gradients, or where ranks would have to run it together; the message says what to write
                in place of this name.
        """
        if not self._evaluates:
            in_function = callable(self._forward.answers.trainer.compute_loss_func)
            where, call = ("compute_loss_func", "outputs, labels") if in_function else ("compute_loss", "model, inputs")
            raise RuntimeError(
                f"{where} reads {name} of the model's output, which share_prefixes does not compute. Take the labels' "
                "log-probabilities, which are the same with and without it:\n"
                f"    logprobs = tt.token_logprobs({call})  # [B, L - 1], 0 where a label is -100\n"
                "    loss = -logprobs.sum() / num_items_in_batch"
            )
        if self._plain is None:
            with torch.no_grad():
                self._plain = self._forward.plain(**self._inputs)
        return self._plain

    def token_logprobs(
        self, labels: Tensor | None, temperature: float, *, entropy: bool, ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probabilities of the labels' tokens, entropies, and those at ids; see `treetrain.token_logprobs`."""
        inputs = self._inputs | {"labels": labels}
        return self._forward.answers.token_logprobs(self._forward, inputs, temperature, entropy=entropy, ids=ids)

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
