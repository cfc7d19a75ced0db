"""The README.md beside a trained model: what was trained, on what, how it ended, and with which versions."""

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import treetrain
from treetrain.models.loading import PRESETS

CARD = "README.md"
SETTINGS = (
    *("execution", "learning_rate", "lr_scheduler_type", "optim", "tokens_per_step", "updates_per_batch"),
    *("minibatches", "temperature", "bf16", "seed"),
)
"""Arguments that the card lists."""
LAST = ("loss", "nll", "reward", "approx_kl", "accuracy", "eval_loss", "eval_nll")
"""Logs whose last value the card has."""
SHARED = " Prefixes that rows share were computed once; loss and gradients are those of each row alone."


def write_card(trainer: Any, folder: Path) -> bool:
    """Write the card into the folder; False if a README.md is there already, which stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (folder / CARD).open("x", encoding="utf-8") as file:  # nor is a link followed
            file.write(card_of(trainer))
    except FileExistsError:
        return False
    return True


def card_of(trainer: Any) -> str:
    """The card as Markdown, with metadata of the hub in front. PEFT adds its own to that of an adapter."""
    args, state = trainer.args, trainer.state
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    adapters = getattr(model, "peft_config", {})
    base = str(getattr(model.config, "_name_or_path", "") or "")
    of_hub = bool(base) and base not in PRESETS and not os.path.exists(base)
    metadata = [f"base_model: {json.dumps(base)}"] if of_hub else []
    metadata += [f"library_name: {'peft' if adapters else 'transformers'}", "tags: [treetrain]"]
    what = "An adapter of" if adapters else "A model trained from"
    options = f" with `{json.dumps(args.loss_kwargs)}`" if args.loss_kwargs else ""
    rows = len(trainer.train_dataset) if trainer.train_dataset is not None else 0
    files = ", ".join(f"`{Path(name).name}`" for name in trainer.trained_on) or "rows in memory"
    facts = {"data": f"{files} ({rows:,} rows)", "loss": f"`{_loss(trainer)}`{options}"}
    facts["steps"] = f"{state.global_step:,} ({state.epoch or 0:.3g} passes over the data)"
    settings = {name: getattr(args, name) for name in SETTINGS}
    facts |= {name: f"`{getattr(value, 'value', value)}`" for name, value in settings.items()}  # some are enums
    for adapter in adapters.values():
        facts["adapter"] = f"{getattr(adapter.peft_type, 'value', adapter.peft_type)}"
        facts["adapter"] += f", r={adapter.r}, alpha={adapter.lora_alpha}" if hasattr(adapter, "lora_alpha") else ""
    logged = {name: entry[name] for entry in state.log_history for name in LAST if name in entry}
    facts |= {f"last {name}": f"{value:.6g}" for name, value in logged.items()}
    packages = ("torch", "transformers", "accelerate", *(("peft",) if adapters else ()))
    facts["versions"] = ", ".join([f"treetrain {treetrain.__version__}", *(f"{p} {version(p)}" for p in packages)])
    return "\n".join(
        (
            *("---", *metadata, "---", "", f"# {Path(args.output_dir or '.').absolute().name}", ""),
            f"{what} `{base or type(model).__name__}`." + SHARED * (args.execution == "tree"),
            *("", "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts.items()), ""),
        )
    )


def _loss(trainer: Any) -> str:
    """The name that the arguments give, or the class of a loss that was passed."""
    named = type(trainer.loss).__module__.startswith("treetrain.")
    return trainer.args.loss if named else type(trainer.loss).__qualname__
