"""What reaches the attention interface at run time is checked too: a window or mask that no configuration told of."""

import pytest
import torch
from torch import nn

from support.forests import attention_forest
from treetrain.attention.rectangles import RectangleAttention
from treetrain.errors import UnsupportedModel
from treetrain.models.switch import TreeRun, _tree_attention


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
        ({"softcap": 50.0}, r"softcap=50\.0"),
        ({"s_aux": torch.zeros(2)}, "s_aux"),
        ({"a_keyword_of_tomorrow": 1}, "a_keyword_of_tomorrow=1"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "attention_mask"),
        ({"is_causal": False}, "is_causal"),
        ({"value_size": 4}, "size 8 and value heads of size 4"),
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
