"""Is a model supported? Answered from its configuration alone, before any weight is read."""

from typing import TYPE_CHECKING, Any

from treetrain.errors import UnsupportedModel
from treetrain.models.own_attention import with_softcap

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
    if model is None:
        return None
    capabilities = check_model(model)
    _check_masks(model)
    return capabilities


class _FirstLayer(Exception):
    """A forward has come so far: its masks are made."""


def _check_masks(model: "nn.Module") -> None:
    """Let a model without weights make its masks, as every forward does before its first layer.

    Whatever else goes wrong there may be for want of weights, and is left to the first call.

    Raises:
        UnsupportedModel: a mask that is not known here, or a window that the configuration does not have.
    """
    import torch
    from torch import nn

    from treetrain.models.masks import windowless
    from treetrain.models.switch import tree_attention

    def stop(*_args: Any) -> None:
        raise _FirstLayer

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    handles = [layer.register_forward_pre_hook(stop) for layers in lists for layer in layers]
    two = torch.ones((1, 2), dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), tree_attention(model):
            model(input_ids=two, position_ids=two, attention_mask=two, use_cache=False)
    except UnsupportedModel:
        raise
    except ValueError as error:
        refusal = windowless(type(model).__name__, error)
        if refusal is not None:
            raise refusal from error
    except Exception:
        return
    finally:
        for handle in handles:
            handle.remove()


def model_without_weights(config: Any, **options: Any) -> "nn.Module | None":
    """A model on the meta device, as `load_model` would give it; None where its class computes with its weights while
    it is made.

    Raises:
        UnsupportedModel: transformers has no causal language model of this configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **options).eval()
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            return None
        raise UnsupportedModel(
            f"{type(config).__name__} belongs to no causal language model that transformers knows"
        ) from error
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return model if "attn_implementation" in options else with_softcap(model)


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
    passed = {key: options[key] for key in ("trust_remote_code", "attn_implementation") if key in options}
    try:
        check_config(config, **passed)
    except ImportError:  # what this attention needs is not installed
        return
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from error


_FOR_CONFIG = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "trust_remote_code", "code_revision")
