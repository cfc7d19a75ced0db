"""The output folder: never overwritten by accident, never half a model."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from treetrain.train.checkpoint_files import FOLDER as CHECKPOINTS
from treetrain.train.metrics import METRICS_FILE

CONFIG_FILE = "train_config.json"
MARK = "config.json"  # a folder without it loads as no model
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*", "adapter_config.json")


def check_output(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder that a run would destroy something in. Creates nothing.

    Raises:
        ValueError: a file is in the way, or there is a model or a run in the folder already.
    """
    for parent in (folder, *folder.parents):
        if parent.exists():
            if not parent.is_dir():
                raise ValueError(f"output {folder}: {parent} is a file; name a folder")
            if not os.access(parent, os.W_OK | os.X_OK):
                raise ValueError(f"output {folder}: {parent} cannot be written to; name another folder")
            break
    if overwrite or not folder.is_dir():
        return
    patterns = (MARK, METRICS_FILE, CHECKPOINTS, *_WEIGHTS)
    held = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    if held:
        resumed = "--resume auto to go on with it, " if METRICS_FILE in held or CHECKPOINTS in held else ""
        raise ValueError(
            f"output {folder} holds an earlier run or model ({', '.join(held[:4])}); name another folder, or pass "
            f"{resumed}--overwrite to replace it"
        )


def save_result(folder: Path, model: nn.Module, tokenizer: Any, config: dict[str, Any]) -> None:
    """Write the model folder: first completely under a temporary name, then renamed into place file by file.

    Nothing that was in the folder besides a model is touched. The file that makes a folder a model goes last, and that
    of a replaced model first, so that a folder that loads is never a mixture.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
        made = Path(temporary)
        model.save_pretrained(made)  # type: ignore[operator]
        if tokenizer is not None:
            tokenizer.save_pretrained(made)
        (made / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / MARK).unlink(missing_ok=True)
        for pattern in _WEIGHTS:
            for path in folder.glob(pattern):
                path.unlink()
        # Weights are written readable by their owner only; a folder that a team shares has one mode.
        for path in made.glob("*.safetensors"):
            shutil.copymode(made / CONFIG_FILE, path)
        for path in sorted(made.iterdir(), key=lambda path: path.name == MARK):
            if path.is_dir() and (folder / path.name).is_dir():
                shutil.rmtree(folder / path.name)
            os.replace(path, folder / path.name)
