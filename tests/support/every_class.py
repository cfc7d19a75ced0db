"""Every causal LM class of transformers, made small, run on a tree and judged: exact, refused, or not tried and why."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import treetrain as tt
from support import families
from treetrain.errors import UnsupportedModel
from treetrain.models.capability import check_model
from treetrain.softmax_attention.rectangles import RectangleAttention
from treetrain.softmax_attention.schedule import PLAIN_ATTENTION
from treetrain.testing import linear
from treetrain.testing.contract import PureFloat64, as_dtype

ROWS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 11, 12, 3, 2], [5, 6, 13, 14], [5, 6, 7, 8, 9, 10, 3, 4], [20, 21, 22]]
EXACT = 1e-10
"""Relative error of the whole gradient in float64, the library's float32 casts lifted; rounding is 1e-15."""
EXACT_WITH_CASTS = 1e-5
"""Where lifting the casts breaks the model's own code."""
SINGLE = 1e-5
"""The same in float32."""
KEPT_CASTS = "the library's own float32 casts could not be lifted"
ROUGH = "the rows' own float32 error is above 3e-6"
LARGEST = 1_500_000
"""Parameters of a model that is run."""
NAMES: dict[str, str] = dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))
"""model_type -> class, as transformers' AutoModelForCausalLM has them."""

WIDTHS = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "dim", "hidden_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "rotary_dim", "d_kv"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "num_key_value_heads": 2,
    "vocab_size": 37,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.1,
    "is_decoder": True,  # models that may be made either way
}
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("ffn_hidden_size", "zero_expert_num"), 4),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
}
LOW_RANK = {"q_lora_rank": 14, "kv_lora_rank": 10, "qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 8}
PER_LAYER_INPUT = {  # Gemma 3n and 4
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "laurel_rank": 8,
    "global_head_dim": 8,
}
RECURRENT = {
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "mamba_head_dim", "mamba_d_head", "chunk_size"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
}
WINDOWS: dict[str, Any] = {
    "sliding_window": families.WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "layer_types": ["sliding_attention", "full_attention"],
}
_SMALL_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_ROPE = {"rope_theta": 1e4, "rope_type": "default"}
_INDEXER = {"indexer_budget": 8, "indexer_compress_ratio": 2, "indexer_head_dim": 8, "indexer_kv_heads": 1}
_NGRAMS = {"ngram_vocab_size_base": 50, "split_ngram_parts": 1, "ple_embed_dim": 16, "hc_lowrank": 4}
_SIGNS = {f"{kind}_{size}": 40 for kind in ("pronunciation", "shape") for size in ("vocab_size", "embed_dim")}
_CODEBOOKS = {"num_codebooks": 2, "pad_token_id": 36, "bos_token_id": 36}
PARTICULAR: dict[str, dict[str, Any]] = {  # what a class needs that no other does
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": families.WINDOW,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        "logit_scale": 0.5,
    },
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        "max_seq_len": 64,
    },
    "git": {"vision_config": _SMALL_VISION},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "musicgen": _CODEBOOKS,
    "musicgen_melody": _CODEBOOKS,
    "qwen4_exp": _INDEXER | _NGRAMS | {"indexer_n_heads": 2, "layer_types": ["linear_attention", "indexed_attention"]},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "roc_bert": _SIGNS,
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}
PARTICULAR["qwen4_exp_text"] = PARTICULAR["qwen4_exp"]
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers")


class Verdict(NamedTuple):
    """The finding about one model class."""

    model_type: str
    model_class: str
    verdict: str
    """exact, refused, untried (neither could be shown here), or wrong (a bug of ours)."""
    reason: str = ""
    """The refusal, or why nothing was shown."""
    error: float | None = None
    """Relative error of the whole gradient in float64, against every row by itself."""
    single: float | None = None
    """The same in float32."""
    layers: tuple[str, ...] = ()
    """Kinds of layers of the model that was run: as its attention was asked, and as its configuration names others."""


def judge(model_type: str) -> Verdict:
    """Make it small, run it on a tree in one part and in parts of 7 tokens, and compare with the rows."""
    found = Verdict(model_type, NAMES[model_type], "untried")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = small_model(model_type)
        if model is None:
            return _judge_unbuilt(found)
        text = model.config.get_text_config()
        found = found._replace(layers=tuple(dict.fromkeys(getattr(text, "layer_types", None) or ())))
        try:
            check_model(model)
        except UnsupportedModel as error:
            return found._replace(verdict="refused", reason=str(error))
        return _run(found, model)


def _run(found: Verdict, model: nn.Module) -> Verdict:
    for context, bound in ((PureFloat64, EXACT), (contextlib.nullcontext, EXACT_WITH_CASTS)):
        with context():
            try:
                expected = _of_rows(model)
            except Exception as error:  # whatever its own forward says about fields that do not suit it
                found = found._replace(reason=f"the small model's own forward fails: {_line(error)}")
                continue
            try:
                with seen_by_attention() as asked:
                    worst = max(_error(model, expected, budget) for budget in (None, 7))
            except UnsupportedModel as error:
                assert all(p.grad is None for p in model.parameters()), "refused after gradients were made"
                return found._replace(verdict="refused", reason=str(error))
            except Exception as error:
                found = found._replace(verdict="wrong", reason=f"fails on a tree: {_line(error)}")
                continue
        found = found._replace(error=worst, layers=kinds_of(model, found.layers, asked))
        reason = "" if context is PureFloat64 else KEPT_CASTS
        return _in_float32(
            found._replace(verdict="exact" if worst <= bound else "wrong", reason=reason), model, expected
        )
    return found


def _in_float32(found: Verdict, model: nn.Module, truth: torch.Tensor) -> Verdict:
    single = as_dtype(model, torch.float32)
    expected = _of_rows(single)
    error = max(_error(single, expected, budget) for budget in (None, 7))
    rounding = linear.relative_error(expected, truth)
    close = error <= max(SINGLE, 3 * rounding)
    reasons = [reason for reason in (found.reason, ROUGH if rounding > SINGLE / 3 else "") if reason]
    return found._replace(single=error, reason="; ".join(reasons), verdict=found.verdict if close else "wrong")


def _of_rows(model: nn.Module) -> torch.Tensor:
    scores, _ = linear.score_rows(model, ROWS)
    return linear.gradients(model, -torch.cat(scores).mean())


def _error(model: nn.Module, expected: torch.Tensor, budget: int | None) -> float:
    model.zero_grad(set_to_none=True)
    rows = [tt.Trajectory(row) for row in ROWS]
    tt.TreeEngine(model, budget=budget).forward_backward(rows, tt.losses.sft())
    return linear.relative_error(linear.gradients(model), expected)


Asked = set[str]


@contextlib.contextmanager
def seen_by_attention() -> Iterator[Asked]:
    """Collect the kinds of attention that tree attention is asked for in the block."""
    asked: Asked = set()
    call = RectangleAttention.__call__

    def noting(self, query, key, value, scale, layer=0, spec=PLAIN_ATTENTION, sinks=None):
        visible_range = spec.visible_range
        asked.add(
            "sliding_attention"
            if visible_range.window
            else "chunked_attention"
            if visible_range.chunk
            else "full_attention"
        )
        asked.update({"sinks"} if sinks is not None else (), {"soft-cap"} if spec.softcap else ())
        asked.update({"value heads of another size"} if key.shape[-1] != value.shape[-1] else ())
        return call(self, query, key, value, scale, layer, spec, sinks)

    with mock.patch.object(RectangleAttention, "__call__", noting):
        yield asked


def kinds_of(model: nn.Module, named: tuple[str, ...], asked: Asked) -> tuple[str, ...]:
    """Kinds of layers in the order that the configuration names them, then what it does not name."""
    kinds = [kind for kind in named if kind in asked or "attention" not in kind or kind == "linear_attention"]
    kinds += sorted(asked - set(kinds))
    return (*kinds, *(["experts"] if check_model(model).experts else []))


def _judge_unbuilt(found: Verdict) -> Verdict:
    """Too large, or too particular, to be run: the check alone, on a model without weights."""
    config = _default(found.model_type)
    if config is None:
        return found._replace(reason="its configuration cannot be made from its own defaults")
    try:
        with torch.device("meta"):
            model = getattr(transformers, found.model_class)(config).eval()
    except ImportError:  # which library it names first depends on what is installed
        return found._replace(reason="cannot be made without optional libraries that these tests do not install")
    except Exception as error:
        return found._replace(reason=f"cannot be made here: {_line(error)}")
    try:
        check_model(model)
    except UnsupportedModel as error:
        return found._replace(verdict="refused", reason=str(error))
    return found._replace(reason="passes the check, but cannot be made small enough to be run here")


def small_model(model_type: str, **sizes: Any) -> nn.Module | None:
    """A small float64 model, or None where no variant of the fields gives one.

    Args:
        sizes: of the vocabulary or of positions, or other fields of the configuration, beside those of `WIDTHS`.
    """
    model_class = getattr(transformers, NAMES[model_type], None)
    if model_class is None:
        return None
    for config in _small_configs(model_type, sizes):
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(config).parameters())
            if size <= LARGEST:
                return families.build(model_class, config, dtype=torch.float64)
        except Exception:  # whatever a class says about fields that do not suit it
            continue
    return None


def windowed(model_type: str) -> nn.Module | None:
    """A small float64 model with windows in every other layer; None for a class that knows no windows.

    What `small_model` makes has them only where the class has them by default.
    """
    default = _default(model_type)
    if default is None or not hasattr(default, "sliding_window"):
        return None
    known = dir(default)
    return small_model(model_type, **{name: value for name, value in WINDOWS.items() if name in known})


def _small_configs(model_type: str, sizes: Mapping[str, int] | None = None) -> Iterator[Any]:
    widths = WIDTHS | dict(sizes or {})
    for name, family in families.FAMILIES.items():
        if name == model_type and family.model == NAMES[model_type]:
            yield families.make_config(name, **(sizes or {}))
    default = _default(model_type)
    if default is None:
        return
    known, plain = dir(default), default.to_dict()
    kinds = list(dict.fromkeys(plain.get("layer_types") or ()))
    windows = {} if plain.get("sliding_window") is None else {"sliding_window": families.WINDOW}
    fields = widths | EXPERTS | LOW_RANK | RECURRENT | PER_LAYER_INPUT | windows
    fields["vocab_size_per_layer_input"] = widths["vocab_size"]
    if "kv_lora_rank" in known:
        fields["num_key_value_heads"] = 4
    listed = {"layer_types": kinds} | dict.fromkeys(LAYERS, len(kinds)) if len(kinds) > 1 else {}
    particular = PARTICULAR.get(model_type, {})
    for changes in (
        *([fields | dict.fromkeys(LAYERS, 2) | particular] if particular else []),
        fields | dict.fromkeys(LAYERS, 2) | listed,
        fields | dict.fromkeys(LAYERS, 2) | listed | {"pad_token_id": 0},
        widths | windows | dict.fromkeys(LAYERS, 2),
        widths | dict.fromkeys(LAYERS, 2) | {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        widths | EXPERTS | {"num_key_value_heads": 4} | dict.fromkeys(LAYERS, 2),
        {key: widths[key] for key in ("hidden_size", "vocab_size", "intermediate_size")} | dict.fromkeys(LAYERS, 2),
    ):
        with contextlib.suppress(Exception):
            given = {key: value for key, value in changes.items() if key in known or key in particular}
            yield type(default)(**given)
    if isinstance(plain.get("text_config"), dict):  # text beside images: the text part small, the others as they may be
        text_type = plain["text_config"]["model_type"]
        small = {key: value for key, value in (fields | dict.fromkeys(LAYERS, 2)).items()}
        texts = [{key: value for key, value in small.items() if key in dir(CONFIG_MAPPING[text_type]())}]
        if text_type in NAMES:
            texts += [config.to_dict() for config in _small_configs(text_type, sizes)]
        for text in texts:
            others = [name for name in default.sub_configs if name != "text_config"]
            for rest in (dict.fromkeys(others, _SMALL_VISION), dict.fromkeys(others)):
                with contextlib.suppress(Exception):
                    yield type(default)(text_config=text, **rest)


def _default(model_type: str) -> Any:
    """The configuration that the class takes, of its own defaults."""
    config_class = CONFIG_MAPPING[model_type]
    model_class = getattr(transformers, NAMES[model_type], None)
    wanted = getattr(model_class, "config_class", None)
    parts = [part for part in getattr(config_class, "sub_configs", {}).values() if part is wanted]
    if isinstance(wanted, type) and "Decoder" in wanted.__name__:  # Musicgen's is part of no configuration
        parts.append(wanted)
    with contextlib.suppress(Exception):
        return parts[0]() if parts else config_class()
    return None


def _line(error: Exception) -> str:
    words = (str(error).strip() or type(error).__name__).splitlines()
    return f"{type(error).__name__}: {words[0][:160]}"
