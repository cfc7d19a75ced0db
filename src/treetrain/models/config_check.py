"""Is a model supported? Answered from its configuration alone, before any weight is read."""

from typing import TYPE_CHECKING, Any

from treetrain.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch import nn

    from treetrain.models.capability import Capabilities


def check_config(config: Any, **options: Any) -> "Capabilities | None":
    """`check_model` on a model of this configuration without weights, in evaluation mode.

    Args:
        config: a transformers configuration.
        options: for `AutoModelForCausalLM.from_config`.

    Returns:
        What the engine needs to know of it; None where the class cannot be made without weights, so that only the
        loaded model can be checked.

    Raises:
        UnsupportedModel: no causal language model, or one that would not be exact on a tree.
    """
    from treetrain.models.capability import check_model

    model = model_without_weights(config, **options)
    return None if model is None else check_model(model)


def model_without_weights(config: Any, **options: Any) -> "nn.Module | None":
    """A model on the meta device; None where its class computes with its weights while it is made.

    Raises:
        UnsupportedModel: transformers has no causal language model of this configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, **options).eval()
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            return None
        raise UnsupportedModel(
            f"{type(config).__name__} belongs to no causal language model that transformers knows"
        ) from error
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def check_named(name: str, source: str, options: dict[str, Any]) -> None:
    """The same for a folder or hub id, as `from_pretrained` would load it with these options; a model whose
    configuration cannot be read is left to the loader, which says why.

    Raises:
        UnsupportedModel: naming the model and what of it would not be exact.
    """
    from transformers import AutoConfig

    passed = {key: options[key] for key in _FOR_CONFIG if key in options}
    try:
        config = options.get("config") or AutoConfig.from_pretrained(source, **passed)
    except (OSError, ValueError, KeyError):
        return
    trusted = {key: options[key] for key in ("trust_remote_code",) if key in options}
    try:
        check_config(config, **trusted)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from error


_FOR_CONFIG = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "trust_remote_code", "code_revision")
