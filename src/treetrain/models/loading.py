"""Loads models, configurations and tokenizers by name: a preset, a local folder or a hub id.

A model that would not be exact on a tree is refused from its configuration, before weights are read or downloaded.
Presets are small built-in models with random weights, for trying things out without a network. Their tokenizer and chat
template are in the folder presets; `examples/countdown/train_tokenizer.py` trained it. Loading it needs no torch.
"""

import itertools
import json
import logging
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from treetrain.core.errors import DataError, UnsupportedModel, shortened

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

    from treetrain.core.hf.capability import Capabilities

logger = logging.getLogger(__name__)
TOKENIZER_FOLDER = Path(__file__).parent / "presets"
PRESETS = {
    "tiny": {"layers": 4, "hidden": 256, "feed_forward": 768, "heads": 4, "kv_heads": 2},
    "small": {"layers": 9, "hidden": 512, "feed_forward": 1536, "heads": 8, "kv_heads": 4},
}
"""Qwen3 models of 3.7 and 29.4 million parameters; the embedding is shared with the head."""
_PRESETS = ", ".join(PRESETS)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
_NO_CODE = {"trust_remote_code": False}
"""transformers would ask on the terminal whether to run code of the model's own; here only an option says so."""
_FOR_CONFIG = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "trust_remote_code", "code_revision")


def load_model(
    name_or_path: str | Path, *, dtype: "torch.dtype | str" = "float32", seed: int = 0, **options: object
) -> "PreTrainedModel":
    """Load a causal language model in evaluation mode, on the CPU unless `options` say otherwise.

    A checkpoint for images and text is loaded whole; it takes rows of text.

    A model that would not be exact on a tree is refused from its configuration, before weights are read or downloaded.
    A model with soft-capped attention scores gets eager attention if transformers' choice would ignore the cap.

    Args:
        name_or_path: a preset's name ("tiny" or "small": random weights, no download), else a local folder, else a
            hub id ("Qwen/Qwen3-0.6B").
        dtype: dtype of the weights; "auto" keeps the checkpoint's (float32 for a preset).
        seed: seed of a preset's random weights; not used otherwise.
        options: passed to ``from_pretrained`` of `AutoModelForCausalLM` (or `AutoModelForImageTextToText`); not
            allowed for presets.

    Raises:
        DataError: the folder is missing or holds no model, or the hub cannot give it.
        UnsupportedModel: transformers knows no causal language model there, or it is not exact on a tree.
    """
    name = str(name_or_path)
    if name in PRESETS:
        if options:
            raise ValueError(f"the preset {name!r} takes no options, got: {', '.join(sorted(options))}")
        return _preset_model(name, seed, "float32" if dtype == "auto" else dtype)
    folder = _model_folder(name)
    source = str(folder or name)
    _check_source(name, source, options)
    import torch

    from treetrain.layers.wrapped import with_softcap

    given = {"ignore_mismatched_sizes": True, "output_loading_info": True} | _NO_CODE | options
    reports = logging.getLogger("transformers.modeling_utils")
    level = reports.level
    try:
        reports.setLevel(logging.ERROR)  # its table of weights that do not fit; `_check_weights` says it in a line
        auto = _auto_class(_config_of(source, options))
        model, found = auto.from_pretrained(source, dtype=dtype, **given)  # type: ignore[misc]
    except Exception as error:  # whatever a library raises here is about the user's files
        raise _cannot_load("model", name, folder, error) from error
    finally:
        reports.setLevel(level)
    if "ignore_mismatched_sizes" not in options:
        _check_weights(name, found)
    if "experts_implementation" not in options and model.dtype == torch.float64:
        # transformers' default for experts, torch's grouped matmul, does not support float64.
        can_set = getattr(model, "_can_set_experts_implementation", None)  # not in every release of transformers
        if can_set is not None and can_set():
            model.set_experts_implementation("eager")
    return model if "attn_implementation" in options else with_softcap(model)


def load_config(name_or_path: str | Path) -> "PreTrainedConfig":
    """Load the configuration of a model; takes the names and raises the errors of `load_model`."""
    name = str(name_or_path)
    if name in PRESETS:
        return _preset_config(**PRESETS[name])
    folder = _model_folder(name)
    from transformers import AutoConfig

    try:
        _check_sizes(str(folder or name), {})
        return AutoConfig.from_pretrained(str(folder or name), **_NO_CODE)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    except Exception as error:
        raise _cannot_load("configuration", name, folder, error) from error


def load_tokenizer(name_or_path: str | Path, **options: object) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model; needs no torch.

    Args:
        name_or_path: as in `load_model`.
        options: passed to `AutoTokenizer.from_pretrained`; presets ignore them.

    Raises:
        DataError: the folder holds no tokenizer, or the hub cannot give it.
    """
    name = str(name_or_path)
    folder = None if name in PRESETS else _local_folder(name)
    if folder is not None and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise DataError(
            f"{folder} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}); save one there with "
            "tokenizer.save_pretrained, or name another"
        )
    from transformers import AutoTokenizer

    if name in PRESETS:
        return AutoTokenizer.from_pretrained(TOKENIZER_FOLDER, local_files_only=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder or name), **_NO_CODE | options)
    except Exception as error:
        raise _cannot_load("tokenizer", name, folder, error) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust, which is no Exception
            raise
        raise _cannot_load("tokenizer", name, folder, RuntimeError(str(error))) from error
    growth = _growth(getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None))
    if growth > MOST_GROWTH:
        raise DataError(
            f"the tokenizer of {name} replaces texts by others that are up to {growth:,.0f} times as long; none "
            f"needs more than {MOST_GROWTH} times, and long texts would fill the memory"
        )
    return tokenizer


MOST_LAYERS, MOST_MODULES = 10_000, 300_000
"""A configuration with more layers, or of a model of more modules, is refused before it is built."""
MOST_GROWTH = 100
"""A tokenizer may replace a text by one that is so many times as long."""


def _growth(normalizer: Any) -> float:
    """How many times as long a text may become by the replacements of a normaliser of tokenizers."""

    def of(one: dict[str, Any]) -> float:
        if one["type"] == "Sequence":
            return math.prod(map(of, one["normalizers"]))
        if one["type"] == "Prepend":
            return 1.0 + len(one["prepend"])
        if one["type"] == "Replace":  # an expression may match at every character
            return max(1.0, len(one["content"]) / max(1, len(one["pattern"].get("String", ""))))
        return 1.0

    return 1.0 if normalizer is None else of(json.loads(normalizer.__getstate__()))


def _check_sizes(source: str, options: dict[str, Any]) -> None:
    """Refuse a configuration with more layers than models have: its class would list them. Raises DataError."""
    from transformers import PreTrainedConfig

    found, _ = PreTrainedConfig.get_config_dict(source, **options)
    pending: list[Any] = [found]
    while pending:
        for name, value in pending.pop().items():
            pending += [value] if isinstance(value, dict) else []
            if "layer" in name and isinstance(value, int | float) and value > MOST_LAYERS:
                raise DataError(f"config.json has {name}={value:,}, more than {MOST_LAYERS:,}, which no model has")


@contextmanager
def _few_modules() -> Iterator[None]:
    """Raise DataError inside the block when a model of more modules than any has is being built."""
    from torch.nn.modules.module import register_module_module_registration_hook

    numbers = itertools.count(1)

    def count(*_: object) -> None:
        if next(numbers) > MOST_MODULES:
            raise DataError(f"the configuration is that of a model of more than {MOST_MODULES:,} modules")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _preset_config(*, layers: int, hidden: int, feed_forward: int, heads: int, kv_heads: int) -> "PreTrainedConfig":
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=2048,  # exactly the ids of the tokenizer
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=16_384,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def _preset_model(name: str, seed: int, dtype: "torch.dtype | str") -> "PreTrainedModel":
    """Draw the weights in float32 and cast them, so one seed means the same model in every dtype."""
    import torch
    from transformers import AutoModelForCausalLM

    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"dtype is {dtype!r}; give one of torch, such as float32 or bfloat16")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(load_config(name), dtype=torch.float32)
    model.config.dtype = kind
    return model.to(dtype=kind).eval()


def model_without_weights(config: "PreTrainedConfig", **options: object) -> "nn.Module | None":
    """Build a causal LM of this configuration on the meta device, in evaluation mode.

    Returns:
        The model; None if its constructor cannot run without weights.

    Raises:
        UnsupportedModel: transformers has no causal language model for this configuration.
    """
    import torch

    from treetrain.layers.wrapped import with_softcap

    try:
        with torch.device("meta"), _few_modules():
            model = _auto_class(config).from_config(config, **options).eval()
    except DataError:
        raise
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            return None
        raise UnsupportedModel(
            f"{type(config).__name__} belongs to no causal language model that transformers knows"
        ) from error
    except (RuntimeError, NotImplementedError, TypeError):  # its constructor computes with its weights
        return None
    except Exception as error:
        said = shortened(" ".join(str(error).split())) or "no reason is said"
        raise DataError(
            f"no {type(config).__name__} of these numbers can be built ({type(error).__name__}: {said}); correct its "
            "config.json"
        ) from error
    return model if "attn_implementation" in options else with_softcap(model)


def check_config(config: "PreTrainedConfig", **options: object) -> "Capabilities | None":
    """Run `check_model` on a model of this configuration without weights, in evaluation mode.

    Args:
        config: a transformers configuration.
        options: passed to ``from_config`` of transformers' auto class.

    Returns:
        The capabilities; None if the model cannot be built without weights. Then only the loaded model can be checked.

    Raises:
        UnsupportedModel: it is not a causal language model, or would not be exact on a tree.
    """
    from treetrain.layers.finders import check_model

    model = model_without_weights(config, **options)
    return None if model is None else check_model(model)


def _check_source(name: str, source: str, options: dict[str, object]) -> None:
    """Run `check_config` for a folder or hub id, as `from_pretrained` would load it with these options.

    A configuration that cannot be read is ignored here; the loader raises an error for it.
    """
    config = _config_of(source, options)
    if config is None:
        return
    try:
        check_config(config, **{k: options[k] for k in ("trust_remote_code", "attn_implementation") if k in options})
    except ImportError:  # a package that this attention needs is not installed
        return
    except (DataError, UnsupportedModel) as error:
        raise type(error)(f"{name}: {error}") from error


def _config_of(source: str, options: dict[str, Any]) -> "PreTrainedConfig | None":
    """Return the configuration that `from_pretrained` would load with these options; None if it cannot be read."""
    from transformers import AutoConfig

    try:
        passed = {key: options[key] for key in _FOR_CONFIG if key in options}
        if options.get("config") is None:
            _check_sizes(source, passed)
        return options.get("config") or AutoConfig.from_pretrained(source, **_NO_CODE | passed)
    except DataError as error:
        raise DataError(f"{source}: {error}") from error
    except Exception:
        return None


def _auto_class(config: "PreTrainedConfig | None") -> "type[AutoModelForCausalLM | AutoModelForImageTextToText]":
    """Return transformers' auto class for this configuration: that of text models, or of models for images and text."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    of_text = type(config) in AutoModelForCausalLM._model_mapping or getattr(config, "auto_map", None)
    of_images = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if of_images and not of_text else AutoModelForCausalLM


def _local_folder(name: str) -> Path | None:
    """Return the folder of that name; None if it does not exist and the name may be a hub id."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise DataError(f"{name} is a file; a model is named by its folder, a hub id or a preset ({_PRESETS})")
    parts = name.split("/")
    if len(parts) <= 2 and all(part and part[0] not in ".~-" and not set(part) & set("\\ :") for part in parts):
        return None
    raise DataError(
        f"there is no folder {name}, and it cannot be a hub id either; give an existing model folder, a hub id such "
        f"as Qwen/Qwen3-0.6B, or a preset ({_PRESETS})"
    )


def _model_folder(name: str) -> Path | None:
    """Return `_local_folder`, and refuse one without a configuration."""
    folder = _local_folder(name)
    if folder is None or (folder / "config.json").is_file():
        return folder
    if (folder / "adapter_config.json").is_file():
        raise DataError(
            f"{folder} holds a LoRA adapter (adapter_config.json) and no model; name its base model here and put "
            "the adapter on with peft.PeftModel.from_pretrained"
        )
    raise DataError(f"{folder} has no config.json, so it is no model's folder; save_pretrained writes one")


def _check_weights(name: str, found: Mapping[str, Iterable[str]]) -> None:
    """Refuse a model if some weights are not in its files: transformers would draw them at random.

    Args:
        found: transformers' loading info.

    Raises:
        DataError: weights are missing, or have another shape than in the configuration.
    """
    missing, unused = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    for key, stored, expected in sorted(found["mismatched_keys"]):
        raise DataError(
            f"{name}: {key} has shape {tuple(stored)} in the weight files and {tuple(expected)} by config.json; the "
            "files are of another model, or of another configuration"
        )
    if missing:
        raise DataError(
            f"{name}: the weight files lack {len(missing)} of the model's weights, e.g. {missing[0]}; they would be "
            "random. Save the whole model, or pass ignore_mismatched_sizes=True to load_model if they are to be trained"
        )
    if unused:
        logger.warning("%s: %d weights of its files are not in the model, e.g. %s", name, len(unused), unused[0])


def _cannot_load(what: str, name: str, folder: Path | None, error: Exception) -> DataError | UnsupportedModel:
    """Make the error to raise in place of an error of transformers or of a library below it."""
    reason = shortened(" ".join(str(error).split()) or type(error).__name__, 160)
    if isinstance(error, pickle.UnpicklingError):
        return DataError(
            f"{name}: its pickled weights hold more than tensors, and are not loaded, since a pickle can run code; "
            "save them as safetensors where you trust them"
        )
    if "trust_remote_code" in str(error):
        return UnsupportedModel(
            f"{name} brings code of its own, which is not run; use a model that transformers knows, or in Python load "
            "it with trust_remote_code=True"
        )
    if isinstance(error, ValueError) and "attn_implementation" in str(error):
        return UnsupportedModel(f'{name} does not run by this attention: {reason}; give attn_implementation="eager"')
    if isinstance(error, ValueError) and what != "tokenizer":
        return UnsupportedModel(f"{name} holds no {what} that transformers knows: {reason}")
    if folder is not None:
        cure = "; the file is torn, copy it again" if type(error).__name__ == "SafetensorError" else ""
        return DataError(f"the {what} in {folder} cannot be read: {reason}{cure}")
    return DataError(
        f"{name!r} is no folder and no preset ({_PRESETS}), and as a hub id its {what} cannot be had: "
        f"{reason.split('. ')[0]}. Check the spelling and the network, or give a local folder"
    )


# ---- the table of classes


FILE = "table.json"
VERDICTS = ("exact", "refused", "untried")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassFound:
    """The verdict on one class."""

    model_type: str
    model_class: str
    verdict: Literal["exact", "refused", "untried"]
    """exact: gradients of a small random model equal the gradients of its separate rows. refused: an error names the
    reason before any work. untried: the tests could not run it; it is checked when it is loaded."""
    reason: str = ""
    """The error message if refused; why it was not tried if untried; why its bound is wider if exact."""
    layers: tuple[str, ...] = ()
    """Kinds of layers of the small model, or in its configuration if it was not run."""
    float64: float | None = None
    """Worst relative error of the whole gradient in float64 against separate rows; two digits."""
    float32: float | None = None
    """Worst relative error of the whole gradient in float32."""
    rows_float32: float | None = None
    """Worst error of the separate rows in float32 against float64; only where it makes the bound wider."""
    bfloat16: float | None = None
    """Error in bfloat16 divided by the error of the separate rows in bfloat16, pooled over forests."""

    @property
    def errors(self) -> tuple[str, ...]:
        """The three errors, formatted."""
        ratio = "" if self.bfloat16 is None else f"{self.bfloat16:.2g}"
        return *("" if x is None else f"{x:.1e}" for x in (self.float64, self.float32)), ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyTable:
    """All classes of one release of transformers."""

    transformers: str
    classes: tuple[ClassFound, ...]

    @classmethod
    def packaged(cls) -> Self:
        """The table that this release of the library was tested with."""
        data = json.loads(resources.files("treetrain.models").joinpath(FILE).read_text(encoding="utf-8"))
        found = [ClassFound(**{**entry, "layers": tuple(entry["layers"])}) for entry in data["classes"]]
        return cls(transformers=data["transformers"], classes=tuple(found))

    def find(self, model_type: str) -> ClassFound | None:
        """The class of a `model_type`; None if the table does not have it."""
        return next((found for found in self.classes if found.model_type == model_type), None)
