"""One way to name a model: a built-in preset, a local folder, or a repository of the Hugging Face hub."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetrain.errors import DataError, UnsupportedModel
from treetrain.models.config_check import check_named
from treetrain.models.own_attention import with_softcap
from treetrain.models.presets import PRESETS, is_preset, load_preset_model, preset_config, preset_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def load_model(
    name_or_path: str | Path, *, dtype: "torch.dtype | str" = "float32", seed: int = 0, **options: Any
) -> "PreTrainedModel":
    """Load a causal language model, on the CPU unless `options` say otherwise, in evaluation mode.

    A model that would not be exact on a tree is refused from its configuration, before a weight is read or fetched.
    One whose attention scores are soft-capped gets its family's own attention where transformers would choose one that
    leaves the cap out.

    Args:
        name_or_path: a preset's name ("tiny" or "small": random weights, no download), else a local folder, else a
            hub id ("Qwen/Qwen3-0.6B").
        dtype: of the weights; "auto" keeps that of the checkpoint (float32 for a preset).
        seed: of a preset's random weights; nothing else uses it.
        options: for `AutoModelForCausalLM.from_pretrained`; not for presets.

    Raises:
        DataError: the folder is missing or holds no model, or the hub cannot give it.
        UnsupportedModel: what is there is no causal language model that transformers knows, or none that is exact on
            a tree.
    """
    name = str(name_or_path)
    if is_preset(name):
        if options:
            raise ValueError(f"the preset {name!r} takes no options, got: {', '.join(sorted(options))}")
        return load_preset_model(name, seed=seed, dtype="float32" if dtype == "auto" else dtype)
    folder = _local_folder(name)
    if folder is not None:
        _check_model_folder(folder)
    check_named(name, str(folder or name), options)
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder or name), dtype=dtype, **options)
        model = model if "attn_implementation" in options else with_softcap(model)
        return model if "experts_implementation" in options else _experts_in_float64(model)
    except ValueError as error:
        raise UnsupportedModel(f"{name} is no causal language model that transformers can load: {error}") from error
    except OSError as error:
        raise _cannot_load("model", name, folder, error) from error


def _experts_in_float64(model: "PreTrainedModel") -> "PreTrainedModel":
    """Transformers' first choice for experts, torch's grouped products, knows no float64: then the plain loop."""
    import torch

    able = getattr(model, "_can_set_experts_implementation", None)  # not in every release of transformers
    if model.dtype == torch.float64 and able is not None and able():
        model.set_experts_implementation("eager")
    return model


def load_config(name_or_path: str | Path) -> "PreTrainedConfig":
    """The configuration of a model named as in `load_model`. Raises DataError where there is none."""
    name = str(name_or_path)
    if is_preset(name):
        return preset_config(name)
    folder = _local_folder(name)
    if folder is not None:
        _check_model_folder(folder)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder or name))
    except ValueError as error:
        raise UnsupportedModel(f"{name} is no model that transformers knows: {error}") from error
    except OSError as error:
        raise _cannot_load("configuration", name, folder, error) from error


def load_tokenizer(name_or_path: str | Path, **options: Any) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model; needs no torch.

    Args:
        name_or_path: as that of `load_model`.
        options: for `AutoTokenizer.from_pretrained`; presets ignore them.

    Raises:
        DataError: the folder holds no tokenizer, or the hub cannot give it.
    """
    name = str(name_or_path)
    if is_preset(name):
        return preset_tokenizer(name)
    folder = _local_folder(name)
    if folder is not None and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise DataError(
            f"{folder} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}); save one there with "
            "tokenizer.save_pretrained, or name another"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder or name), **options)
    except (OSError, ValueError) as error:
        raise _cannot_load("tokenizer", name, folder, error) from error


def _local_folder(name: str) -> Path | None:
    """The folder that `name` means; None where it reads as a hub id and no such folder exists."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise DataError(f"{name} is a file; a model is named by its folder, a hub id or a preset ({_presets()})")
    if _reads_as_hub_id(name):
        return None
    raise DataError(
        f"there is no folder {name}, and it cannot be a hub id either; give an existing model folder, a hub id such "
        f"as Qwen/Qwen3-0.6B, or a preset ({_presets()})"
    )


def _reads_as_hub_id(name: str) -> bool:
    parts = name.split("/")
    plain = all(part and part[0] not in ".~-" and not set(part) & set("\\ :") for part in parts)
    return plain and len(parts) <= 2


def _check_model_folder(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise DataError(
            f"{folder} holds a LoRA adapter (adapter_config.json) and no model; name its base model here and put "
            "the adapter on with peft.PeftModel.from_pretrained"
        )
    held = sorted(path.name for path in folder.iterdir())
    seen = f"it holds {', '.join(held[:5])}{', ...' if len(held) > 5 else ''}" if held else "it is empty"
    raise DataError(f"{folder} has no config.json, so it is no model folder ({seen}); name the folder that has it")


def _cannot_load(what: str, name: str, folder: Path | None, error: Exception) -> DataError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if folder is not None:
        return DataError(f"the {what} in {folder} cannot be read: {reason}")
    return DataError(
        f"there is no folder and no preset {name!r} (presets: {_presets()}), and as a hub id its {what} could not be "
        f"had, neither from the local cache nor from the hub: {reason}. Check the spelling and the network, or give "
        "a local folder"
    )


def _presets() -> str:
    return ", ".join(PRESETS)
