"""A model folder out of a checkpoint, by one process, however many have written it."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from treetrain import __version__
from treetrain.data.rendering import chat_template_text
from treetrain.errors import DataError
from treetrain.models.loading import load_model, load_tokenizer
from treetrain.train import checkpoint_files
from treetrain.train.adapters import add_adapter, check_adapter
from treetrain.train.checkpoint import changing_tensors, frozen_digest, load_piece, load_weights
from treetrain.train.checkpoint_files import MANIFEST, Checkpoint
from treetrain.train.config import TrainConfig
from treetrain.train.config_file import settings_as_toml
from treetrain.train.output_lock import output_lock
from treetrain.train.save import CONFIG_FILE, MARK, TOML_FILE, check_output, save_result

Weights = Literal["last", "average", "best"]
_PIECES = {"average": ("average", "values", "ema_decay"), "best": ("best", "weights", "keep_best")}
"""The part of a run's state that has them, their name in it, and the setting that keeps them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written."""

    output: str
    checkpoint: str
    step: int
    weights: Weights
    adapter: bool
    """Whether it is an adapter, for a base model, and no model."""
    notes: tuple[str, ...]
    """What the user should know."""


def export(
    checkpoint: str | Path,
    output: str | Path,
    *,
    weights: Weights = "last",
    model: str | None = None,
    tokenizer: str | None = None,
    merge: bool = False,
    overwrite: bool = False,
) -> Exported:
    """Write the model of a checkpoint as transformers and peft load it, with tokenizer and settings.

    Args:
        checkpoint: one of them; or a run's folder, of which the newest whole one is taken. Every byte of it is checked.
        output: a folder.
        weights: as they were after its last step, their average, or those of the best evaluation so far.
        model: where the model that the run began with is now; None: where it was.
        tokenizer: instead of the run's.
        merge: add an adapter to its base model and write the sum.
        overwrite: replace a model that is in the folder.

    Raises:
        ValueError: there is no whole checkpoint, it lacks these weights, the base model is another one, or the output
            folder holds a model.
        OSError: the disk does not take it.
    """
    folder = Path(output)
    check_output(folder, overwrite=overwrite)
    found, torn = checkpoint_files.at(Path(checkpoint))
    if found is None:
        told = f": {'; '.join(torn)}" if torn else ""
        raise DataError(f"{checkpoint} holds no whole checkpoint{told}; name a checkpoint or the folder of a run")
    config = _config_of(found, model, tokenizer)
    check_adapter(config)
    if merge and not config.lora_rank:
        raise ValueError(f"merge adds an adapter to its base model, but the run of {found.path} trained no adapter")
    trained = _loaded(found, config, weights)
    if merge:
        trained = trained.merge_and_unload()  # type: ignore[operator]
    used, missing = _tokenizer(config)
    notes = (*(f"not whole, left out: {each}" for each in torn), *missing)
    with output_lock(folder):
        save_result(folder, trained, used, _description(found, config, weights))
    return Exported(
        output=str(folder),
        checkpoint=str(found.path),
        step=found.step,
        weights=weights,
        adapter=bool(config.lora_rank) and not merge,
        notes=notes,
    )


def _config_of(found: Checkpoint, model: str | None, tokenizer: str | None) -> TrainConfig:
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    settings: dict[str, Any] = {name: value for name, value in found.facts["config"].items() if name in known}
    settings["model"] = model or settings["model"]
    settings["tokenizer"] = tokenizer or settings.get("tokenizer") or settings["model"]
    return TrainConfig(**settings)


def _loaded(found: Checkpoint, config: TrainConfig, weights: Weights) -> nn.Module:
    """The model with the weights that are wanted."""
    model = add_adapter(_base(found, config), config)
    if frozen_digest(model) != found.facts["frozen"]:
        raise DataError(
            f"{config.model} is not the base model of {found.path}: weights that were not trained differ. Say with "
            "--model where the one is that the run began with"
        )
    load_weights(found.path, model)
    if weights == "last":
        return model
    piece, entry, setting = _PIECES[weights]
    state = load_piece(found.path, piece)
    values = None if state is None else state[entry]
    if values is None:
        raise ValueError(f"{found.path} has no {weights} weights: {setting} was not set, or there was none so far")
    with torch.no_grad():
        for name, tensor in changing_tensors(model).items():
            if name in values:
                tensor.copy_(values[name])
    return model


def _base(found: Checkpoint, config: TrainConfig) -> nn.Module:
    """The model as the run loaded it, or where all of it was trained and it is gone, one of the same kind."""
    try:
        return load_model(config.model, seed=config.seed, dtype=torch.float32)
    except DataError:
        if config.lora_rank or not (found.path / MARK).is_file():
            raise
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(found.path), dtype=torch.float32)


def _tokenizer(config: TrainConfig) -> tuple[Any, tuple[str, ...]]:
    try:
        tokenizer = load_tokenizer(config.tokenizer or config.model)
        if config.chat_template is not None:
            tokenizer.chat_template = chat_template_text(config.chat_template)
        return tokenizer, ()
    except DataError as error:
        return None, (f"no tokenizer is saved with the model: {error}",)


def _description(found: Checkpoint, config: TrainConfig, weights: Weights) -> dict[str, str]:
    described = {
        "config": config.as_dict(),
        "versions": {"treetrain": __version__, "torch": torch.__version__},
        "steps": found.facts["total"],
        "checkpoint": {"step": found.step, "weights": weights, "manifest": str(found.path / MANIFEST)},
    }
    return {CONFIG_FILE: json.dumps(described, indent=2) + "\n", TOML_FILE: settings_as_toml(config)}
