"""Settings of trainers under which shared prefixes would not give the same numbers, refused before training."""

from typing import Any, Literal

from transformers import Trainer

from treetrain.errors import UnsupportedModel
from treetrain.trainers.shards import is_sharded

Seam = Literal["fused", "loss", "rewards"]
"""How a trainer asks its model: for log-probabilities by TRL's fused head, for a loss, or for rewards."""

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


def seam_of(trainer: Any) -> Seam:
    """How this trainer asks its model.

    Raises:
        ValueError: a trainer of TRL that is not known here, or another version of TRL.
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
        if kind.__name__ in SEAMS:
            return SEAMS[kind.__name__]
        raise ValueError(f"{kind.__name__} of TRL is not known here; known are {', '.join(SEAMS)}")
    return "loss"


def check_trainer(trainer: Any, seam: Seam) -> None:
    """Refuse what could not be exact.

    Raises:
        ValueError: with the setting to change.
    """
    args, accelerator = trainer.args, trainer.accelerator
    distributed = str(accelerator.distributed_type.value)
    refusals: list[tuple[Any, str]] = [
        (
            distributed not in ("NO", "MULTI_CPU", "MULTI_GPU"),
            f"distributed_type={distributed}: gradients are synchronised for DistributedDataParallel and one process "
            "only; launch without DeepSpeed, FSDP or Megatron (for FSDP2 use tt.TreeTrainer)",
        ),
        (
            args.n_gpu > 1,
            f"torch.nn.DataParallel over {args.n_gpu} GPUs: launch one process for each with torchrun, or make one "
            "visible with CUDA_VISIBLE_DEVICES",
        ),
        (
            args.fp16 or accelerator.scaler is not None,
            "fp16=True: its gradient scaler is not known to the tree's backward; set bf16=True instead",
        ),
        (
            args.torch_compile,
            "torch_compile=True: the model's attention is switched at every call; set torch_compile=False",
        ),
        (args.use_liger_kernel, "use_liger_kernel=True: it replaces the model's layers; set it to False"),
        (
            args.neftune_noise_alpha,
            f"neftune_noise_alpha={args.neftune_noise_alpha}: a shared token would get one noise where every row has "
            "its own; set it to None",
        ),
        (
            args.label_smoothing_factor,
            f"label_smoothing_factor={args.label_smoothing_factor} needs the probabilities of all tokens, of which "
            "only the labels' are computed; set it to 0",
        ),
        (
            trainer.model_init is not None,
            "model_init, which makes another model when training begins; give the trainer a model",
        ),
        (
            callable(trainer.compute_loss_func),  # TRL sets a string that only tells the Trainer not to scale its loss
            "compute_loss_func is given logits, which are not computed; override compute_loss of a TRL trainer, which "
            "reads log-probabilities, or leave compute_loss_func out",
        ),
        (
            getattr(args, "activation_offloading", False),
            "activation_offloading=True: the tree's backward comes after the trainer's; bound memory by budget=...",
        ),
        (
            getattr(trainer, "_is_vlm", False) or getattr(trainer, "_is_vision_dataset", False),
            "a model with images or a processor: rows with media are not known to share prefixes; use a text model "
            "with its tokenizer",
        ),
        (
            getattr(args, "parallelism_config", None) or getattr(accelerator, "parallelism_config", None),
            "parallelism_config: context, sequence and tensor parallelism cut rows apart; leave it out",
        ),
        (
            is_sharded(trainer.model),
            "a model that is sharded over processes; train it with tt.TreeTrainer",
        ),
        (
            "lomo" in args.optim or "layerwise" in args.optim,
            f"optim={args.optim}: it updates weights within the trainer's backward, before the tree's; take another",
        ),
    ]
    for refused, reason in refusals:
        if refused:
            raise ValueError(f"share_prefixes cannot be exact with {reason}")
    _check_dropout(trainer.model)
    if seam == "loss":
        _check_own_loss(trainer)


def _check_dropout(model: Any) -> None:
    """LoRA's by the name of its setting; other dropout is found in the model's modules, and refused there."""
    for name, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "lora_dropout", 0.0):
            raise UnsupportedModel(
                f"adapter {name!r} has lora_dropout={config.lora_dropout}: a shared token would get one mask where "
                "every row has its own; give LoraConfig(lora_dropout=0.0) (TRL's own default is 0.05)"
            )


def _check_own_loss(trainer: Any) -> None:
    from treetrain.models.capability import causal_lm

    if type(trainer).compute_loss is not Trainer.compute_loss and not _is_ours(type(trainer)):
        raise ValueError(
            f"{type(trainer).__name__} overrides compute_loss, whose calls of the model are not known here; derive it "
            "from one of TRL's trainers, or use tt.TreeTrainer"
        )
    lm = causal_lm(trainer.model)
    kind = getattr(lm, "loss_type", None)
    if kind != "ForCausalLM":
        raise UnsupportedModel(
            f"{type(lm).__name__} has loss_type={kind}; a plain Trainer's loss is known of models with a causal LM's "
            "cross-entropy (ForCausalLM)"
        )


def _is_ours(kind: type) -> bool:
    """Whether the first compute_loss beside the mixin's is that of transformers."""
    own = [k for k in kind.__mro__ if "compute_loss" in vars(k) and not k.__module__.startswith("treetrain.")]
    return own[0] is Trainer
