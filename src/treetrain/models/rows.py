"""Files to rows that a model can take: the part of every command that comes before the model. Needs no torch."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from treetrain.data.load import load, read_rows_of_file
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.models.loading import load_tokenizer
from treetrain.models.presets import PRESETS, is_preset


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReadRows:
    """Rows, what the user should know of them, and the tokenizer they were made with."""

    rows: Sequence[Trajectory]
    notes: tuple[str, ...]
    format: Literal["tokens", "chat"]
    tokenizer: Any
    """None for token rows."""


def read_rows(
    files: Sequence[str],
    *,
    model: str | None = None,
    tokenizer: str | None = None,
    format: Literal["auto", "tokens", "chat"] = "auto",
    **options: Any,
) -> ReadRows:
    """Read files, with a tokenizer where they hold conversations.

    Args:
        files: see `tt.load`.
        model: gives the tokenizer, and the vocabulary and positions that rows are checked against.
        tokenizer: instead of the model's own; a hub id, a folder or a preset.
        format, options: as `tt.load` takes them.

    Raises:
        DataError: naming file and line, the model, or the tokenizer that cannot be had.
    """
    name, chat = tokenizer or model, format == "chat"
    if format == "auto" and files:
        _, row = next(read_rows_of_file(files[0]))
        chat = "messages" in row and "input_ids" not in row
    config = {} if model is None else read_config(model)
    found = load_tokenizer(name) if chat and name is not None else None
    loaded = load(
        list(files),
        tokenizer=found,
        format=format,
        vocab_size=config.get("vocab_size"),
        max_positions=config.get("max_position_embeddings", config.get("n_positions")),
        **options,
    )
    return ReadRows(rows=loaded.trajectories, notes=loaded.notes, format=loaded.format, tokenizer=found)


def read_config(model: str) -> dict[str, Any]:
    """The text part of a model's configuration as plain data, before any weights are read and without torch.

    Raises:
        DataError: there is no such model, or its config.json cannot be read.
    """
    path = None if is_preset(model) else _config_file(model)
    if path is None:
        return _preset_config(model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a model's configuration ({error})") from error
    if not isinstance(config, dict):
        raise DataError(f"{path} holds no JSON object, so it is no model's configuration")
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _preset_config(name: str) -> dict[str, Any]:
    """What `preset_config(name).to_dict()` says, without transformers (a test compares them)."""
    preset = PRESETS[name]
    return {
        "model_type": "qwen3",
        "num_hidden_layers": preset.layers,
        "hidden_size": preset.hidden,
        "intermediate_size": preset.feed_forward,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.kv_heads,
        "head_dim": preset.head_dim,
        "vocab_size": preset.vocabulary,
        "max_position_embeddings": preset.max_positions,
        "tie_word_embeddings": True,
    }


def _config_file(model: str) -> Path:
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return folder / "config.json"
    if folder.exists() or model.count("/") > 1 or model.startswith((".", "/", "~")):
        raise DataError(
            f"{model} is no model folder: there is no {folder / 'config.json'}; name the folder that has it, a hub id, "
            f"or a preset ({', '.join(PRESETS)})"
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # network, authentication, a name that is none: the hub has many ways to say no
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"there is no folder and no preset {model!r} (presets: {', '.join(PRESETS)}), and the hub could not give "
            f"its config.json: {reason}"
        ) from error
