"""The output folder: never overwritten by accident, never half a model."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from treetrain.engine.ranks import Ranks, is_sharded
from treetrain.train.average import WeightAverage
from treetrain.train.checkpoint_files import FOLDER as CHECKPOINTS
from treetrain.train.metrics import METRICS_FILE
from treetrain.train.parallel import from_main
from treetrain.train.sharding import whole_state

CONFIG_FILE, TOML_FILE = "train_config.json", "train_config.toml"
MARK, ADAPTER_MARK = "config.json", "adapter_config.json"  # a folder with neither loads as no model and no adapter
AVERAGE_FOLDER = "ema"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*", "adapter_model.bin")


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
    patterns = (MARK, ADAPTER_MARK, METRICS_FILE, CHECKPOINTS, *_WEIGHTS)
    held = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    if held:
        resumed = "--resume auto to go on with it, " if METRICS_FILE in held or CHECKPOINTS in held else ""
        raise ValueError(
            f"output {folder} holds an earlier run or model ({', '.join(held[:4])}); name another folder, or pass "
            f"{resumed}--overwrite to replace it"
        )


def save_result(
    folder: Path,
    model: nn.Module,
    tokenizer: Any,
    texts: Mapping[str, str],
    *,
    average: WeightAverage | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Write the model folder: first completely under a temporary name, then renamed into place file by file.

    Nothing that was in the folder besides a model is touched. The file that makes a folder a model goes last, and that
    of a replaced model first, so that a folder that loads is never a mixture.

    Args:
        folder: exists.
        model: of transformers, or of peft, of which the adapter alone is saved.
        tokenizer: None where there is none.
        texts: other files by name.
        average: goes into a folder of its own inside, as a whole model or adapter.
        ranks: that hold the model, or a copy each; the first of them writes. A collective call.

    Raises:
        RanksDisagree: on the other ranks, where the first one could not write.
    """
    ranks = ranks or Ranks()
    context = (
        tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") if ranks.rank == 0 else nullcontext(str(folder))
    )
    with context as temporary:
        made = Path(temporary)
        _write_model(made, model, tokenizer, ranks)
        if average is not None:
            with average.in_place():
                _write_model(made / AVERAGE_FOLDER, model, tokenizer, ranks)
        from_main(ranks, "saving the model", lambda: _put_in_place(folder, made, texts))


def _put_in_place(folder: Path, made: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (made / name).write_text(text, encoding="utf-8", errors="backslashreplace")
    _remove_model(folder)
    # Weights are written readable by their owner only; a folder that a team shares has one mode.
    for path in made.rglob("*.safetensors"):
        shutil.copymode(made / CONFIG_FILE, path)
    for path in sorted(made.iterdir(), key=lambda path: path.name in (MARK, ADAPTER_MARK)):
        if path.is_dir() and (folder / path.name).is_dir():
            shutil.rmtree(folder / path.name)
        os.replace(path, folder / path.name)


def _write_model(folder: Path, model: nn.Module, tokenizer: Any, ranks: Ranks) -> None:
    state = whole_state(model) if is_sharded(model) else None
    from_main(ranks, "writing the model", lambda: _write_state(folder, model, tokenizer, state))


def _write_state(folder: Path, model: nn.Module, tokenizer: Any, state: dict[str, Tensor] | None) -> None:
    folder.mkdir(exist_ok=True)
    # The base model's embeddings are never resized here, so no adapter needs a copy of them.
    options: dict[str, Any] = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {}
    options |= {} if state is None else {"state_dict": state}
    model.save_pretrained(folder, **options)  # type: ignore[operator]
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if (folder / ADAPTER_MARK).exists():
        # peft writes an empty model card, which would replace what somebody wrote.
        (folder / "README.md").unlink(missing_ok=True)


def _remove_model(folder: Path) -> None:
    """Remove the model that is replaced; its mark first."""
    for mark in (MARK, ADAPTER_MARK):
        (folder / mark).unlink(missing_ok=True)
    for pattern in _WEIGHTS:
        for path in folder.glob(pattern):
            path.unlink()
    inner = folder / AVERAGE_FOLDER
    if any((inner / mark).exists() for mark in (MARK, ADAPTER_MARK)):
        shutil.rmtree(inner)
