"""The attention interface checks its calls at run time too: windows and masks that no configuration mentions."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, masking_utils

from support.plans import attention_forest
from treetrain.core.attention.rectangles import RectangleAttention
from treetrain.core.errors import UnsupportedModel
from treetrain.core.hf.tree_mode import INTERFACE, RangeMask, TreeRun, _tree_attention, hooks_replaced, mask_of
from treetrain.core.tree.layout import AttentionRange


def layer(kind: str | None = None, softcap: float | None = None, sinks: int = 0) -> nn.Module:
    """A layer as far as attention looks at it."""
    module = nn.Identity()
    module.config = SimpleNamespace(layer_types=[kind] if kind else None, attn_logit_softcapping=softcap)  # type: ignore[assignment]
    module.layer_idx = 0  # type: ignore[assignment]
    if sinks:
        module.sinks = nn.Parameter(torch.zeros(sinks))
    return module


def call(value_size: int = 8, tokens: int = 4, module: nn.Module | None = None, **keywords):
    run = TreeRun(RectangleAttention(attention_forest([[1, 2, 3, 4]])), tokens)
    q, k, v = (torch.randn(1, 2, 4, size) for size in (8, 8, value_size))
    given = {"attention_mask": None, "treetrain_run": run} | keywords
    return _tree_attention(module or nn.Identity(), q, k, v, **given)


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"sliding_window": 4}, "sliding_window=4"),
        ({"dropout": 0.1}, r"dropout=0\.1"),
        ({"softcap": 50.0}, r"softcap=50\.0, its configuration for attn_logit_softcapping=None"),
        ({"s_aux": torch.zeros(2)}, r"s_aux=\(2,\).*none in the layer"),
        (
            {"attention_mask": RangeMask(AttentionRange(window=3)), "sliding_window": 4},
            "sliding_window=4, but its mask is a window of 3",
        ),
        (
            {"attention_mask": RangeMask(AttentionRange(chunk=4)), "sliding_window": 4},
            "sliding_window=4, but its mask is chunks of 4",
        ),
        ({"module": layer(softcap=30.0)}, r"softcap=None, its configuration for attn_logit_softcapping=30\.0"),
        ({"module": layer(sinks=2)}, "s_aux=nothing"),
        ({"module": layer(sinks=3), "s_aux": torch.zeros(3)}, r"s_aux=\(3,\), where one sink for each of 2 heads"),
        ({"a_keyword_of_tomorrow": 1}, "a_keyword_of_tomorrow=1"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "attention_mask"),
        ({"is_causal": False}, "is_causal"),
        ({"tokens": 3}, "the tree has 3: something adds tokens"),
        ({"treetrain_run": None}, "without the tree run"),
    ],
)
def test_what_is_not_exact_on_a_tree_is_refused_by_the_layer(keywords, says):
    with pytest.raises(UnsupportedModel, match=says):
        call(**keywords)


def test_a_module_that_is_not_causal_is_refused():
    module = nn.Identity()
    module.is_causal = False  # type: ignore[assignment]
    with pytest.raises(UnsupportedModel, match="is_causal"):
        call(module=module)


def test_keywords_that_change_nothing_are_accepted():
    out, weights = call(sliding_window=None, softcap=None, use_cache=False, position_ids=torch.arange(4), dropout=0.0)
    assert out.shape == (1, 4, 2, 8) and weights is None


def test_what_a_layer_and_its_configuration_agree_on_is_accepted():
    for module, keywords in (
        (layer("full_attention"), {}),
        (layer("sliding_attention"), {"attention_mask": RangeMask(AttentionRange(window=3)), "sliding_window": 3}),
        (layer("sliding_attention"), {"attention_mask": RangeMask(AttentionRange(window=3))}),
        (layer("chunked_attention"), {"attention_mask": RangeMask(AttentionRange(chunk=2))}),
        (layer(softcap=30.0), {"softcap": 30.0}),
        (layer(sinks=2), {"s_aux": torch.ones(2)}),
        (layer(), {"value_size": 4}),
    ):
        out, _ = call(module=module, **keywords)
        assert out.shape == (1, 4, 2, keywords.get("value_size", 8))


POSITIONS = torch.tensor([[0, 1, 2, 1, 2]])  # as of a tree: transformers takes them for packed rows
MASKS = {
    "causal": (masking_utils.create_causal_mask, {}, None),
    "window": (masking_utils.create_sliding_window_causal_mask, {}, AttentionRange(window=3)),
    "chunks": (masking_utils.create_chunked_causal_mask, {}, AttentionRange(chunk=2)),
    "more than causal": (masking_utils.create_causal_mask, {"or_mask_function": lambda b, h, q, k: q >= 0}, "or_mask"),
    "less than causal": (masking_utils.create_causal_mask, {"and_mask_function": lambda b, h, q, k: q > k}, "lambda"),
    "blocks": (masking_utils.create_causal_mask, {"block_sequence_ids": torch.zeros(1, 5)}, "or_mask"),
}


@pytest.mark.parametrize("name", MASKS)
def test_what_the_models_own_mask_says_is_read_from_it_or_refused(name):
    make, options, expected = MASKS[name]
    config = LlamaConfig(num_attention_heads=2, hidden_size=8)
    config.sliding_window, config.attention_chunk_size = 3, 2
    config._attn_implementation_internal = INTERFACE
    for positions in (None, POSITIONS[:, :3], POSITIONS):
        embeds = torch.zeros(1, 5 if positions is None else positions.shape[1], 8)
        given = {"config": config, "inputs_embeds": embeds, "attention_mask": None, "past_key_values": None}
        if isinstance(expected, str):
            with pytest.raises(UnsupportedModel, match=expected):
                make(**given, position_ids=positions, **options)
        else:
            found = make(**given, position_ids=positions, **options)
            assert (None if found is None else found.range) == expected


def test_a_mask_with_two_bounds_is_refused():
    window, chunks = masking_utils.sliding_window_overlay(3), masking_utils.chunked_overlay(2, torch.zeros(1))
    with pytest.raises(UnsupportedModel, match="a window of 3, chunks of 2"):
        mask_of(masking_utils.and_masks(window, chunks))


@pytest.mark.parametrize("use", [lambda mask: mask.dtype, lambda mask: mask[:, :, :2], lambda mask: mask.to("cpu")])
def test_a_model_that_computes_with_its_mask_is_refused(use):
    with pytest.raises(UnsupportedModel, match="computes with its attention mask, a window of 3"):
        use(RangeMask(AttentionRange(window=3)))


def test_hooks_replaced_are_back_in_their_order_and_those_of_the_block_follow():
    def first(): ...
    def second(): ...
    def third(): ...
    def new(): ...

    hooks, none = {1: first, 2: second, 3: third}, {}
    with hooks_replaced([hooks, None, none], {first: None, second: new, third: third}.get):
        assert hooks == {2: new, 3: third}
        del hooks[3]  # as a hook that removes itself
        hooks[4] = new
    assert list(hooks.items()) == [(1, first), (2, second), (4, new)] and not none
