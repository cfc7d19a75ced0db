"""Checks that a trainer can share prefixes exactly: its settings before training, and a few rows of its first batch."""

import logging
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer

from treetrain.data.prefix_order import sorted_by_prefix
from treetrain.engine.costs import cost_if_countable
from treetrain.engine.distributed import is_sharded
from treetrain.engine.engine import TreeEngine
from treetrain.engine.gradients import gradients_of
from treetrain.errors import UnsupportedModel
from treetrain.models.capability import causal_lm
from treetrain.trainers.batches import IGNORED, Rows, tree_of
from treetrain.tree.stats import linear_work
from treetrain.verification.verify import relative_error

logger = logging.getLogger(__name__)

Seam = Literal["fused", "loss", "rewards"]
"""How a trainer calls its model: for log-probabilities by TRL's fused head, for a loss, or for rewards."""
TRL_VERSION = "1.16"
SEAMS: dict[str, Seam] = {
    "SFTTrainer": "fused",
    "DPOTrainer": "fused",
    "KTOTrainer": "fused",
    "GRPOTrainer": "fused",
    "RLOOTrainer": "fused",
    "AsyncGRPOTrainer": "fused",
    "RewardTrainer": "rewards",
}
"""TRL's trainers by the name of their class."""
LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest relative difference by the dtype of the computation. TRL's own head always sums in float32."""
ROWS, PARAMETERS = 3, 8
"""How many rows and parameters are compared."""


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
    for name, config in getattr(trainer.model, "peft_config", {}).items():  # the engine refuses other dropout
        if getattr(config, "lora_dropout", 0.0):
            raise UnsupportedModel(
                f"adapter {name!r} has lora_dropout={config.lora_dropout}: a shared token would get one mask where "
                "every row has its own; give LoraConfig(lora_dropout=0.0) (TRL's own default is 0.05)"
            )
    if seam != "loss":
        return
    kinds = [kind for kind in type(trainer).__mro__ if not kind.__module__.startswith("treetrain.")]
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


class Compared(NamedTuple):
    """How far a tree is from the trainer's plain path, on a few rows."""

    scores: float
    """Relative difference of the log-probabilities or rewards."""
    gradients: float
    """Relative difference of the gradients of a random sum of these, over a few parameters."""
    plain_rate: float | None
    """FLOP/s of the plain forward and backward; None for a model that cannot be counted."""


def compare_with_plain(engine: TreeEngine, plain: Callable[..., Any], rows: Rows, seam: Seam) -> Compared | None:
    """Compare scores and gradients of a few rows between the model's own forward and the tree.

    Args:
        engine: of the model, without other ranks.
        plain: the forward that the trainer would have called.

    Returns:
        None where nothing is predicted.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    chosen = rows_to_compare(rows.ids, rows.masks)
    if not chosen:
        return None
    ids, masks = [rows.ids[k] for k in chosen], [rows.masks[k] for k in chosen] if rows.masks else []
    model, device = engine.model, next(engine.model.parameters()).device
    everything = list(model.parameters())
    trained = [k for k, p in enumerate(everything) if p.requires_grad]
    few = [trained[k] for k in np.unique(np.linspace(0, len(trained) - 1, PARAMETERS).astype(int))]
    random = torch.Generator().manual_seed(0)

    def gradients(run: Callable[[], None]) -> list[Tensor]:
        with torch.autocast(device.type, enabled=False):
            left = gradients_of(everything, run)
        return [torch.zeros_like(everything[k]) if (grad := left[k]) is None else grad for k in few]

    for _ in range(2):  # the first run warms up
        start = time.perf_counter()
        expected = _plain_scores(plain, model, ids, masks, seam)
        weights = torch.randn(expected.shape, generator=random).to(expected)
        expected_gradients = gradients((expected * weights).sum().backward)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start

    scored = engine.score(ids, rewards=True) if seam == "rewards" else engine.score(ids, mask=masks)
    if scored.rewards is not None:
        shared = scored.rewards.reshape(expected.shape)
    else:
        shared = torch.cat([row[torch.from_numpy(mask)] for row, mask in zip(scored.logprobs, masks)])

    def run() -> None:
        (shared * weights.to(shared)).sum().backward()
        scored.backward(sync=False)

    apart = relative_error([shared.detach()], [expected.detach()])
    apart_gradients = relative_error(gradients(run), expected_gradients)
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.dtype
    limit = LIMITS.get(dtype, LIMITS[torch.bfloat16])  # type: ignore[arg-type]
    if dtype is torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        limit *= 10  # TF32
    said = (
        f"{len(ids)} rows of the first batch, plain and with shared prefixes: log-probabilities (or rewards) differ by "
        f"{apart:.1e}, gradients by {apart_gradients:.1e} (relative; at most {limit:g} in {dtype})"
    )
    if not (apart <= limit and apart_gradients <= limit):  # also where one is NaN
        raise RuntimeError(
            f"{said}. The model does not give a tree what it gives rows: train without share_prefixes and report this "
            "model, or pass check=False if such a difference is expected"
        )
    logger.info(said)
    cost = cost_if_countable(model)
    work = None if cost is None else cost.counts.flops(*linear_work(tree_of(ids, masks), cost.counts.attention_ranges))
    return Compared(apart, apart_gradients, None if work is None else work / seconds)


def rows_to_compare(ids: list[np.ndarray], masks: list[np.ndarray]) -> list[int]:
    """Choose a few rows with something to predict: two that share most, and the shortest other one."""
    wanted = [k for k in range(len(ids)) if len(ids[k]) and (not masks or masks[k].any())]
    if len(wanted) <= ROWS:
        return wanted
    order, shared = zip(*sorted_by_prefix(wanted, ids.__getitem__))
    first = int(np.argmax(shared[1:]))
    pair = order[first : first + 2]
    return [*pair, min((k for k in order if k not in pair), key=lambda k: len(ids[k]))]


def _plain_scores(
    plain: Callable[..., Any], model: nn.Module, ids: list[np.ndarray], masks: list[np.ndarray], seam: Seam
) -> Tensor:
    """[wanted predictions] log-probabilities, or [K] rewards, of the rows, padded on the right."""
    padding = getattr(causal_lm(model).config.get_text_config(), "pad_token_id", None) or 0  # type: ignore[union-attr,operator]

    def padded(rows: list[Tensor], fill: int) -> Tensor:
        return pad_sequence(rows, batch_first=True, padding_value=fill).to(next(model.parameters()).device)

    rows = [torch.from_numpy(row).long() for row in ids]
    mask = padded([torch.ones_like(row) for row in rows], 0)
    batch = {"input_ids": padded(rows, padding), "attention_mask": mask, "use_cache": False}
    if seam == "rewards":
        return plain(**batch).logits.squeeze(-1)
    unwanted = [torch.from_numpy(~np.append(False, mask)) for mask in masks]
    labels = padded([row.masked_fill(skipped, IGNORED) for row, skipped in zip(rows, unwanted)], IGNORED)
    wanted = labels[:, 1:] != IGNORED
    if seam == "fused":
        return plain(**batch, labels=labels, fused_lm_head=True).log_probs[wanted]
    logits = plain(**batch).logits[:, :-1][wanted]
    logprobs = (logits.float() if logits.dtype.itemsize < 4 else logits).log_softmax(-1)
    return logprobs.gather(-1, labels[:, 1:][wanted][:, None])[:, 0]
