"""One line that makes a transformers or TRL trainer compute shared prefixes once, with the trainer's own losses.

The trainers ask their model for the log-probabilities of a batch and compute the loss from them. Here the model's
forward answers these calls: it recovers the rows of the batch, scores them as a prefix tree (`TreeEngine.score`) and
returns leaves in the shape that the trainer expects. The trainer's own backward ends in the leaves; their gradients
then go through the tree once, before `Accelerator.backward` returns. No loss, metric or schedule is copied.
"""

import functools
import inspect
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutput, SequenceClassifierOutput

from treetrain.engine.costs import cost_if_countable
from treetrain.engine.distributed import is_sharded
from treetrain.engine.engine import TreeEngine
from treetrain.engine.model_state import switches_of
from treetrain.engine.score import Scored
from treetrain.errors import UnsupportedModel
from treetrain.models.capability import causal_lm
from treetrain.models.tree_mode import RUN_KEYWORD
from treetrain.planning.make import Bytes
from treetrain.trainers.batches import TREE_INDEX, Rows, model_inputs, rows_of, tree_of
from treetrain.trainers.checkpoints import replaced
from treetrain.trainers.first_step import Seam, compare_with_plain
from treetrain.tree.stats import linear_work, tree_work
from treetrain.tree.token_tree import TokenTree

T = TypeVar("T", bound=Trainer)
ASYNC_GRPO_ATTENTION = "tree_fa3"
"""The attention implementation that TRL sets on the model of an `AsyncGRPOTrainer`; its kernel is for Hopper GPUs."""
UNDERSTOOD = {
    *("input_ids", "attention_mask", "position_ids", "labels", "use_cache", "return_dict", "output_router_logits"),
    *("num_items_in_batch", "fused_lm_head", "seq_idx"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *TREE_INDEX,
    *("tree_max_seqlen_q", "tree_max_seqlen_k", "shift_labels"),
}
"""Keyword arguments of the model's forward that a tree supports."""
TRL_VERSION = "1.16"
_FUSED = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer", "AsyncGRPOTrainer")
SEAMS: dict[str, Seam] = {"RewardTrainer": "rewards", **{name: "fused" for name in _FUSED}}
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
        the same object; its class is now a subclass of the one it had, with `SharePrefixesMixin`.

    Raises:
        UnsupportedModel: the model would not be exact on a tree.
        ValueError: a setting of the trainer that cannot be exact (the message says what to change), or an unsupported
            version of TRL.
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
        """Get the micro-batches of the next optimizer step, which are scored as one tree if they share prefixes."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self.prefix_sharing.steps.begin_step(batches)
        return batches, num_items

    def _get_per_token_logps_and_entropies(self, *args: Any, batch_size: int | None = None, **kwargs: Any) -> Any:
        """Score all rows of GRPO or RLOO in one call: `batch_size` is ignored, since the budget bounds memory."""
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Run the trainer's training step; its backward continues through the tree."""
        with self.prefix_sharing.training_step():
            return super().training_step(model, *args, **kwargs)  # type: ignore[misc]

    def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute the trainer's loss from the tree's scores."""
        with self.prefix_sharing.loss_of(model) as inner:
            return super().compute_loss(inner, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the trainer's evaluation; if logits are wanted, the model's own forward computes them."""
        sharing = self.prefix_sharing
        sharing.steps.begin_step([])  # scores of the last step come from older weights
        with replaced(sharing, logits_wanted=not prediction_loss_only):
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add overlap, counts and speed-ups since the last logs to the logs of training steps."""
        if "loss" in logs:
            logs.update(self.prefix_sharing.take_logs())
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
            function = getattr(forward, "__func__", forward)
            if "cast_lm_head_to_fp32" in getattr(getattr(function, "__code__", None), "co_freevars", ()):
                given = inspect.getclosurevars(function).nonlocals
                if given["cast_lm_head_to_fp32"]:
                    raise ValueError(
                        "cast_lm_head_to_fp32=True: the head runs in the model's dtype here; set it to False"
                    )
                return cls(float(given["temperature"]), tuple(given["outputs"]))
            forward = getattr(forward, "__wrapped__", None)
        return cls()


class PrefixSharing:
    """The state of a trainer that shares prefixes: engines, scores that wait for their backward, and counts."""

    def __init__(self, trainer: Any, budget: int | str | Bytes | None, check: bool):
        self.seam: Seam = seam_of(trainer)
        check_trainer(trainer, self.seam)
        self.trainer, self.budget, self.check = trainer, budget, check
        self.model: nn.Module = trainer.model
        self.wrapped = self.model
        self._rows_of = functools.partial(rows_of, rewards=self.seam == "rewards")
        self.steps = StepScores(trainer, self._rows_of)
        self.in_loss = self.logits_wanted = False
        self._engines: dict[tuple[int, float], TreeEngine] = {}
        self._awaits_backward = False
        self._counts: Counter[str] = Counter()  # sums since the last logs
        self._logged_once: dict[str, float] = {}
        self._trees = 0
        self._plain_rate: float | None = None  # FLOP/s of the plain forward and backward over a few rows
        self._timed: tuple[Scored, float, float] | None = None  # scores, start, seconds of the plain path (predicted)
        if getattr(self.model.config, "_attn_implementation", None) == ASYNC_GRPO_ATTENTION:
            self.model.set_attn_implementation("sdpa")  # type: ignore[operator]
        models = [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
        heads = [FusedHead.of(model) for model in models]
        for model, head in zip(models, heads):
            self._engine(model, head)  # raises before any forward is replaced
        for model, head in zip(models, heads):
            self._replace_forward(model, head)

    def _replace_forward(self, model: nn.Module, head: FusedHead) -> None:
        """Let the model's forward answer calls for log-probabilities from a tree, and all others as before."""
        plain = model.forward

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(model, plain, head, args, kwargs)

        model.forward = forward

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
    def training_step(self) -> Iterator[None]:
        """Inside the block, `Accelerator.backward` also runs the tree's backward."""
        accelerator, self._awaits_backward = self.trainer.accelerator, False
        self.steps.next_micro_batch()
        plain = accelerator.backward

        def backward(loss: Tensor, **kwargs: Any) -> None:
            plain(loss, **kwargs)
            self._awaits_backward = False
            for scored in self.steps.backward(sync=accelerator.sync_gradients):
                if self._timed is not None and scored is self._timed[0]:
                    _, started, plain_seconds = self._timed
                    self._logged_once["tree/measured_speedup"] = plain_seconds / (self._now() - started)

        with replaced(accelerator, backward=backward):
            yield
        if self._awaits_backward:
            raise RuntimeError(
                "the training step ended before Accelerator.backward was called, so its gradients have not reached the "
                "model; call self.accelerator.backward(loss) where the trainer calls loss.backward()"
            )

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

    # ---- The model's calls ----

    def _forward(self, model: nn.Module, plain: Callable, head: FusedHead, args: tuple, kwargs: dict) -> Any:
        gradients = torch.is_grad_enabled()
        if not self._answers(args, kwargs):
            past_ddp = self.in_loss and model is self.model and gradients and RUN_KEYWORD not in kwargs
            if past_ddp and self.trainer.accelerator.num_processes > 1:
                raise ValueError(
                    f"compute_loss calls the model with {', '.join(sorted(kwargs))}, which no tree answers; on several "
                    "processes its gradients would not be synchronised; train without share_prefixes"
                )
            return plain(*args, **kwargs)
        unknown = sorted(key for key, value in kwargs.items() if key not in UNDERSTOOD and value is not None)
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
                self._logged_once, self._plain_rate = compare_with_plain(
                    self._engine(model, head), plain, rows, self.seam
                )
                self.check = not self._logged_once  # check the next batch if this one predicts nothing
            return self._scored(model, head, rows, kwargs, training)

    def _answers(self, args: tuple, kwargs: dict) -> bool:
        """Whether a call is answered from a tree: it asks for the trainer's scores and does not generate."""
        generates = kwargs.get("past_key_values") is not None
        if args or generates or RUN_KEYWORD in kwargs or kwargs.get("input_ids") is None:
            return False
        if self.seam == "fused":
            return bool(kwargs.get("fused_lm_head"))
        wanted = self.seam == "rewards" or kwargs.get("labels") is not None
        return self.in_loss and wanted and not (self.logits_wanted and self.seam == "loss")

    def _scored(self, model: nn.Module, head: FusedHead, rows: Rows, kwargs: dict, training: bool) -> Any:
        engine = self._engine(self.wrapped if training and model is self.model else model, head)

        def run(tree: TokenTree, masks: list[Any]) -> Scored:
            self._trees += training
            started = self._now() if training and self._trees == 2 else None  # the first tree also warms up
            if self.seam == "rewards":
                scored = engine.score(tree, rewards=True)
            else:
                statistics = bool({"is_top1", "mean_logits", "log_sum_sq_probs"} & set(head.outputs))
                scored = engine.score(tree, mask=masks, entropies="entropy" in head.outputs, statistics=statistics)
            if training:
                self._count(scored, tree, engine, started)
            return scored

        # A call may ask for the routers' auxiliary loss even if the model's configuration does not.
        config: Any = causal_lm(model).config.get_text_config()  # type: ignore[union-attr, operator]
        configured = getattr(config, "output_router_logits", False)
        balanced = bool(configured or kwargs.get("output_router_logits"))
        # A model with another adapter, or with adapters disabled, counts as another model.
        key = id(model), tuple(switches_of(engine).items())
        with replaced(config, **({} if balanced == configured else {"output_router_logits": True})):
            scored, own = self.steps.score(key, rows, run, together=not balanced)
        if balanced and scored.aux_loss is None and self.seam != "rewards":
            raise ValueError(
                "the trainer asks for the routers' auxiliary loss, but router_aux_loss_coef of the model's "
                "configuration is 0 or not known; set it to the trainer's own"
            )
        self._awaits_backward |= training
        if scored.rewards is not None:
            rewards = scored.rewards[own]
            return SequenceClassifierOutput(logits=rewards if rewards.dim() == 2 else rewards[:, None])  # type: ignore[arg-type]

        def batch(values: Sequence[Tensor] | None) -> Tensor | None:
            return None if values is None else rows.batch(values[own])

        log_probs = rows.batch(scored.logprobs[own])
        normaliser = kwargs.get("num_items_in_batch")
        if normaliser is None:
            normaliser = rows.wanted.sum().clamp(min=1 if self.seam == "fused" else 0)
        loss, aux = -log_probs.sum() / normaliser, scored.aux_loss
        if aux is not None:
            loss = loss + engine.capabilities.auxiliary * aux
        if self.seam == "loss":
            return CausalLMOutput(loss=loss)
        from trl.trainer.utils import FusedCausalLMOutput

        is_top1 = batch(scored.is_top1)
        return FusedCausalLMOutput(
            loss=loss,
            log_probs=log_probs,
            entropy=batch(scored.entropies),
            log_sum_sq_probs=batch(scored.log_sum_sq_probs),
            mean_logits=batch(scored.mean_logits),
            is_top1=None if is_top1 is None else is_top1.bool(),
            label_mask=rows.wanted,
            aux_loss=aux,
        )

    # ---- Logs ----

    def _count(self, scored: Scored, tree: TokenTree, engine: TreeEngine, started: float | None) -> None:
        """Add a tree to the counts; if `started` is given, its backward measures the speed-up."""
        self._counts.update(
            {"flat": scored.flat_tokens, "unique": scored.unique_tokens, "parts": scored.parts, "batches": 1}
        )
        if (cost := cost_if_countable(engine.model)) is not None:
            row_flops, tree_flops = (
                cost.counts.flops(*work(tree, cost.counts.attention_ranges)) for work in (linear_work, tree_work)
            )
            self._counts.update({"row_flops": row_flops, "tree_flops": tree_flops})
            if started is not None and self._plain_rate is not None:
                self._timed = scored, started, row_flops / self._plain_rate

    def _now(self) -> float:
        if self.trainer.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def take_logs(self) -> dict[str, float]:
        """Return counts of what this process has shared since the last call, and reset them."""
        counts, self._counts = self._counts, Counter()
        logs, self._logged_once = self._logged_once, {}
        if counts["batches"]:
            logs["tree/overlap"] = 1 - counts["unique"] / max(counts["flat"], 1)
            logs["tree/parts"] = counts["parts"] / counts["batches"]
        if counts["tree_flops"]:
            logs["tree/ideal_speedup"] = counts["row_flops"] / counts["tree_flops"]
        return logs


WORTH_JOINING = 0.9
"""Micro-batches are scored as one tree if it has at most this share of the tokens of their separate trees. The joint
graphs need more memory; if they do not fit, the forward runs twice."""


class StepScores:
    """Scores the micro-batches of an optimizer step as one tree, and returns to each the scores of its rows.

    Gradient accumulation separates rows that share a prefix: TRL's GRPO shuffles its completions over micro-batches,
    and with four of them a speed-up of 5x becomes 1.5x. But the weights change only at the optimizer step, and the
    trainer has all micro-batches of a step before it trains the first. So the model's first call scores all of them.
    Every micro-batch computes its own loss from its own rows, as usual. The tree's backward runs once, after the
    backward of its last micro-batch. Unexpected rows are scored by themselves, which is equally exact.
    """

    def __init__(self, trainer: Any, rows_of: Callable[[dict[str, Any]], Rows]) -> None:
        self._trainer, self._rows_of = trainer, rows_of
        self.begin_step([])

    def begin_step(self, batches: Sequence[Any]) -> None:
        """Set the micro-batches of the next optimizer step, as `Trainer.get_batch_samples` returns them."""
        self._batches, self._position = list(batches), -1
        # By key: the first of some micro-batches, the rows of each, and their scores (None: each is scored alone).
        self._joint: dict[Any, tuple[int, list[Rows], Any]] = {}
        self._waiting: list[tuple[Any, int]] = []

    def next_micro_batch(self) -> None:
        """Go on to the next micro-batch."""
        self._position += 1

    def score(
        self, key: Hashable, rows: Rows, run: Callable[[TokenTree, list[np.ndarray]], Any], *, together: bool = True
    ) -> tuple[Any, slice]:
        """Score the rows of a model call; returns a `Scored`, and the slice of its rows that these are.

        Args:
            key: the model that is called, and its settings.
            run: scores a tree, given the masks of its rows.
            together: False scores this micro-batch alone, for losses over a whole batch such as the routers'.
        """
        key, gradients = (key, torch.is_grad_enabled()), torch.is_grad_enabled()

        def scores(tree: TokenTree, batches: list[Rows]) -> Any:
            scored = run(tree, [mask for rows in batches for mask in rows.masks])
            if gradients:
                self._waiting.append((scored, self._position + len(batches) - 1))
            return scored

        first, batches, scored = self._joint.get(key, (0, [], None)) if together else (0, [], None)
        number = self._position - first
        if not (0 <= number < len(batches) and _equal(batches[number], rows)):
            number, batches, scored = 0, self._following(rows) if together else [rows], None
            if len(batches) > 1:
                tree = _tree_of(batches)
                scored = scores(tree, batches) if _shares(tree, batches) else None
                self._joint[key] = self._position, batches, scored
        if scored is None:
            return scores(_tree_of([rows]), [rows]), slice(0, len(rows.ids))
        begin = sum(len(rows.ids) for rows in batches[:number])
        return scored, slice(begin, begin + len(rows.ids))

    def backward(self, *, sync: bool) -> list[Any]:
        """Run the backward of all trees whose last micro-batch this was; returns their `Scored`.

        Args:
            sync: this is the last micro-batch of the optimizer step: average gradients over the processes.
        """
        due = [scored for scored, last in self._waiting if last <= self._position]
        self._waiting = [(scored, last) for scored, last in self._waiting if last > self._position]
        for scored in due:
            scored.backward(sync=sync and scored is due[-1])
        return due

    def _following(self, rows: Rows) -> list[Rows]:
        """These rows and those of the following micro-batches, as far as they are known; else only these."""
        trainer, batches = self._trainer, self._batches[max(self._position, 0) :]
        if hasattr(trainer, "_buffered_inputs"):  # it generates; its first completions are scored before they are split
            each = trainer.args.steps_per_generation
            left = each * trainer.num_iterations - trainer._step % (each * trainer.num_iterations)
            buffered, numbers = trainer._buffered_inputs, range(trainer._step, trainer._step + min(len(batches), left))
            batches = [] if buffered is None else [buffered[number % each] for number in numbers]
        known = [inputs for inputs in map(model_inputs, batches) if inputs is not None]
        if not known or not _equal(self._rows_of(known[0]), rows):
            return [rows]
        return [rows, *map(self._rows_of, known[1:])]


def _tree_of(batches: list[Rows]) -> TokenTree:
    return tree_of([ids for rows in batches for ids in rows.ids], [mask for rows in batches for mask in rows.masks])


def _shares(tree: TokenTree, batches: list[Rows]) -> bool:
    """Whether micro-batches share enough with each other to be scored as one tree."""
    offsets, tokens = tree.paths()
    ends = offsets[np.cumsum([len(rows.ids) for rows in batches])]
    apart = sum(len(np.unique(own)) for own in np.split(tokens, ends[:-1]))
    return tree.num_tokens <= WORTH_JOINING * apart


def _equal(one: Rows, other: Rows) -> bool:
    pairs = (one.ids, other.ids), (one.masks, other.masks)
    return all(len(a) == len(b) and all(map(np.array_equal, a, b)) for a, b in pairs)


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
        if kind.__name__ not in SEAMS:
            raise ValueError(f"{kind.__name__} of TRL is not known here; known are {', '.join(SEAMS)}")
        return SEAMS[kind.__name__]
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
        "Megatron (for FSDP2 use tt.TreeTrainer)": distributed not in ("NO", "MULTI_CPU", "MULTI_GPU"),
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
    if (kind := getattr(lm, "loss_type", None)) != "ForCausalLM":
        raise UnsupportedModel(
            f"{type(lm).__name__} has loss_type={kind}; with a plain Trainer, give a causal LM whose loss is the "
            "cross-entropy (ForCausalLM)"
        )
