"""Settings of a trainer that cannot be exact with shared prefixes, and how any settings are refused."""

from collections.abc import Iterable, Mapping, Sequence

from transformers import Trainer

from treetrain.core.hf.capability import causal_lm
from treetrain.trainers.batches import ADAPTERS, RECORDED

Refusal = tuple[object, str]
"""Whether a setting is refused; and its name and value, why, and what to set in its place."""
DISTRIBUTED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
"""The ways to hold weights that are supported, by accelerate's distributed type."""
ARGUMENTS = {
    "torch_compile": ", since the attention is switched at every call; set it to False",
    "use_liger_kernel": ", which replaces the model's layers; set it to False",
    "neftune_noise_alpha": ": a shared token would get one noise where every row has its own; set it to None",
    "label_smoothing_factor": ", which needs the probabilities of all tokens; set it to 0",
    "activation_offloading": ": the tree's backward comes after the trainer's; bound memory by budget=",
}
"""Arguments that must not be set, and why."""


def classes_of_trl(trainer: Trainer) -> list[str]:
    """The names of a trainer's classes that are TRL's, the most derived first; none for a plain trainer."""
    names = (kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trl."))
    return [name for name in names if name != "_BaseTrainer"]


def refuse(beginning: str, refusals: Iterable[Refusal]) -> None:
    """Raise ValueError for the first setting that is refused; the message is this beginning and the reason."""
    for refused, reason in refusals:
        if refused:
            raise ValueError(beginning + reason)


def columns_of_rows(trainer: Trainer) -> list[str]:
    """The columns of the training data that say through which experts, ids or adapter a row goes.

    They stay in the data: without this, `remove_unused_columns` takes out what is no argument of the model's forward.

    Raises:
        ValueError: the data collator is one of TRL's, which drop them.
    """
    data, names = trainer.train_dataset, (*RECORDED, ADAPTERS)
    columns = getattr(data, "column_names", None)
    if columns is None and isinstance(data, Sequence) and len(data) and isinstance(data[0], Mapping):
        columns = list(data[0])
    found = [name for name in names if name in (columns or ())]
    collator = trainer.data_collator
    if found and (getattr(collator, "__module__", None) or "").startswith("trl."):
        raise ValueError(
            f"{type(trainer).__name__} drops the column {found[0]} of its train_dataset, so its rows would be trained "
            "without: give it a data_collator that puts the column into the batch, or take a plain "
            "transformers.Trainer with one (GRPO reads what a rollout_func returns); or remove or rename the column"
        )
    if trainer.args.remove_unused_columns:
        trainer._set_signature_columns_if_needed()
        kept: list[str] = trainer._signature_columns or []
        trainer._signature_columns = [*kept, *(name for name in names if name not in kept)]
    return found


def check_trainer(trainer: Trainer) -> None:
    """Refuse settings that cannot be exact.

    Raises:
        ValueError: the message names the setting to change.
    """
    args, accelerator, model = trainer.args, trainer.accelerator, trainer.model
    assert model is not None
    distributed = str(accelerator.distributed_type.value)
    parallelism = getattr(args, "parallelism_config", None) or getattr(accelerator, "parallelism_config", None)
    images = {"image", "images"} & {*(getattr(trainer.train_dataset, "column_names", None) or ())}
    dynamo = accelerator.state.dynamo_plugin
    backend = "NO" if dynamo is None else dynamo.backend.value
    given = {name: getattr(args, name, None) for name in ARGUMENTS}
    refusals: list[Refusal] = [
        (
            distributed not in DISTRIBUTED,
            f"distributed_type={distributed}; launch one process, DistributedDataParallel, FSDP2 (fsdp_version: 2) or "
            "DeepSpeed",
        ),
        (args.n_gpu > 1, f"torch.nn.DataParallel over {args.n_gpu} GPUs; launch one process for each with torchrun"),
        (args.fp16 or accelerator.scaler is not None, "fp16=True and its gradient scaler; set bf16=True instead"),
        *((given[name], f"{name}={given[name]}{why}") for name, why in ARGUMENTS.items()),
        (backend != "NO", f"accelerate's dynamo_backend: {backend}, which compiles the model; leave dynamo_config out"),
        (trainer.model_init is not None, "model_init, which makes another model later; give the trainer a model"),
        (parallelism, "parallelism_config: context, sequence and tensor parallelism cut rows apart; leave it out"),
        (
            (getattr(causal_lm(model), "_tp_size", None) or 1) > 1,
            "a tensor-parallel model (tp_plan), which has not been verified here; take tt.TreeEngine in a loop of your "
            "own",
        ),
        (
            "lomo" in args.optim or "layerwise" in args.optim,
            f"optim={args.optim}, which updates weights within the trainer's backward, before the tree's; take another",
        ),
    ]
    refuse("share_prefixes cannot be exact with ", refusals)
    if images:
        from treetrain.layers.images.encoders import FAMILIES, takes_images

        reason = f"images (column {', '.join(images)} of train_dataset); give rows of text, or a model of "
        refuse("share_prefixes cannot be exact with ", [(not takes_images(model), reason + ", ".join(FAMILIES))])
