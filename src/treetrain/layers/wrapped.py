"""Checks of what users put on a model: adapters, quantised weights, compiled modules, an attention without soft-cap."""

import inspect
from typing import TypeVar

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from treetrain.core.errors import UnsupportedModel
from treetrain.core.hf.capability import causal_lm, text_config_of

M = TypeVar("M", bound=PreTrainedModel)


def check_wrapped(model: nn.Module, config: PreTrainedConfig) -> None:
    """A finder that finds nothing, and refuses what would not be exact on a tree.

    Raises:
        UnsupportedModel: the message names the module or setting, its value, and what to do.
    """
    lm = causal_lm(model)
    if drops_softcap(lm):
        raise UnsupportedModel(
            f"{type(lm).__name__} asks for attn_logit_softcapping={config.attn_logit_softcapping}, but its own "
            f"attention ({config._attn_implementation}) has no soft-cap, so its rows by themselves are another "
            'computation than its configuration says: call model.set_attn_implementation("eager"), or load it with '
            'attn_implementation="eager".'
        )
    _check_adapter(model)
    _check_quantised(model)
    _check_embeddings(model)


def drops_softcap(model: PreTrainedModel) -> bool:
    """Whether the model's attention ignores the soft-cap on attention scores that its configuration sets.

    Tree attention follows the configuration. Some releases of transformers let such a model run with torch's fused
    attention (`sdpa`), which has no soft-cap. Its separate rows would then differ from the model that was trained.
    """
    config = text_config_of(model.config)
    if not getattr(config, "attn_logit_softcapping", None):
        return False
    # "eager" is not in the interface: each family's own file defines it.
    function = AttentionInterface().get(config._attn_implementation)
    return function is not None and "softcap" not in inspect.signature(function).parameters


def with_softcap(model: M) -> M:
    """The model, switched to eager attention if its current attention ignores the soft-cap."""
    if drops_softcap(model):
        model.set_attn_implementation("eager")
    return model


def _check_adapter(model: nn.Module) -> None:
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise UnsupportedModel(
            f"{type(adapter).__name__}: prompt, prefix and p-tuning put tokens of their own before every row, which a "
            "tree has no place for; use LoRA or another adapter of weights."
        )
    tokens = getattr(adapter, "alora_invocation_tokens", None)
    if tokens:
        raise UnsupportedModel(
            f"alora_invocation_tokens={list(tokens)}: an activated LoRA begins at the last such tokens of a call, "
            "which on a tree may belong to another row; use LoRA without them."
        )


def _check_quantised(model: nn.Module) -> None:
    """Refuse quantised layers whose output for a token depends on the call, or whose gradients are wrong."""
    trainable = any(parameter.requires_grad for parameter in model.parameters())
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor):
            continue
        # torchao's tensors say how they quantise inputs. bitsandbytes' int8 layers do so where they do not dequantise
        # their weights; with a threshold, an outlier in one token also changes how all tokens of a call are computed.
        threshold = getattr(getattr(module, "state", None), "threshold", None)
        dequantises = module.training and weight.device.type in ("cpu", "xpu")
        if getattr(weight, "act_quant_kwargs", None) is not None or (threshold is not None and not dequantises):
            how = "" if threshold is None else " in evaluation mode and on CUDA devices"
            raise UnsupportedModel(
                f"{name} ({type(module).__name__}, {type(weight).__name__}) quantises its inputs{how}. That rounds "
                "differences in the last digit between a tree and its rows up to steps of 8 bits, and outliers of one "
                "token (llm_int8_threshold) change the others of a call. Quantise the weights alone: "
                'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4") or torchao\'s Int8WeightOnlyConfig.'
            )
        state = getattr(weight, "quant_state", None)
        packs = getattr(module, "support_avx512bf16_for_cpu", False) and not module.training
        packed = packs or getattr(state, "packing_format_for_cpu", False)
        if state is not None and weight.device.type == "cpu" and trainable and packed:
            raise UnsupportedModel(
                f"{name} is a 4-bit layer packed for inference, as bitsandbytes does on this CPU in evaluation mode, "
                "and for good: no gradient flows through it, with or without a tree. Load the model anew and call "
                "model.train() before its first forward, with all dropout rates 0."
            )


def check_compiled(model: nn.Module) -> None:
    """Refuse compiled modules that hold attention: a traced graph keeps the mask that it was traced with."""
    for name, module in model.named_modules():
        wrapped = type(module).__name__ == "OptimizedModule"
        compiled = wrapped or getattr(module, "_compiled_call_impl", None) is not None
        # transformers' attention and recurrent layers have a layer_idx; norms and MLPs do not.
        if compiled and any(hasattr(inner, "layer_idx") for inner in module.modules()):
            how = "an OptimizedModule (torch.compile)" if wrapped else f"a {type(module).__name__} after .compile()"
            plain = "the model without it" if name or not wrapped else "the model within, model._orig_mod"
            raise UnsupportedModel(
                f"{name or 'the model'} is {how}; a graph that was traced once does not follow a tree. Pass {plain}; "
                "TreeEngine(..., compile_layers=True) compiles layers around tree attention."
            )


def _check_embeddings(model: nn.Module) -> None:
    """Refuse embeddings whose gradients depend on how often a token is in a call."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.scale_grad_by_freq and module.weight.requires_grad:
            raise UnsupportedModel(
                f"{name} ({type(module).__name__}) has scale_grad_by_freq=True: it divides gradients by how often a "
                "token is in a call, and a tree's call has other tokens than a row's. Set it to False."
            )
