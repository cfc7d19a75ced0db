"""Every causal LM class that transformers has is exact on a tree or refused by name: none is silently wrong."""

import warnings

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import treetrain as tt
from support import linear
from treetrain.errors import UnsupportedModel

ROWS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 11, 12, 3, 2], [5, 6, 13, 14], [5, 6, 7, 8, 9, 10, 3, 4], [20, 21, 22]]
LARGEST = 3_000_000
"""Parameters; classes that cannot be made smaller by the fields below are left to their own tests."""
SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "dim", "hidden_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "rotary_dim", "d_kv"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("sliding_window", "pad_token_id")),
    "num_key_value_heads": 2,
    "vocab_size": 37,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.1,
    "layer_types": ["full_attention"] * 2,
}


WINDOWED = SMALL | {  # the same with a window and chunks that the rows outgrow, in every other layer where a family can
    "sliding_window": 3,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "attention_chunk_size": 3,
    "layer_types": ["sliding_attention", "full_attention"],
}
FIELDS = {"full attention": SMALL, "windows": WINDOWED}


def make(name: str, class_name: str, fields: dict = SMALL):
    """A small float64 model, or None where these fields do not give one."""
    model_class, config_class = getattr(transformers, class_name, None), CONFIG_MAPPING[name]
    if model_class is None:
        return None
    try:
        known = dir(config_class())
        changes = {field: value for field, value in fields.items() if field in known}
        try:
            config = config_class(**changes)
        except Exception:
            changes.pop("layer_types", None)
            config = config_class(**changes)
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class(config).parameters())
        torch.manual_seed(0)
        return model_class(config).double().eval() if size < LARGEST else None
    except Exception:  # whatever a class says about fields that do not suit it
        return None


@pytest.mark.slow
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("name", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_a_family_is_exact_or_refused(name, fields):
    warnings.simplefilter("ignore")
    model = make(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name], FIELDS[fields])
    if model is None:
        pytest.skip("cannot be made small here")
    try:
        tt.TreeEngine(model).forward_backward([tt.Trajectory(row) for row in ROWS], tt.losses.sft())
    except UnsupportedModel:
        assert all(p.grad is None for p in model.parameters())
        return
    except (RuntimeError, ValueError, KeyError) as error:
        pytest.skip(f"fails loudly: {error}")
    got = linear.gradients(model)
    try:
        scores, _ = linear.score_rows(model, ROWS)
    except Exception as error:
        pytest.skip(f"its own forward fails with these fields: {error}")
    expected = linear.gradients(model, -torch.cat(scores).mean())
    # The library's float32 casts are not lifted here.
    assert linear.relative_error(got, expected) <= 1e-5
