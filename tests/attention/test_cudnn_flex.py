"""`cudnn.flex_attention` behind a stand-in of its interface, which needs a GPU: intervals of keys against the truth."""

import math
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from test_varlen import both_ways, expected, inputs

from support.plans import attention_forest
from treetrain.check.forests import bushy_rows, forests, runs
from treetrain.check.linear import relative_error
from treetrain.core.attention.reference import visible
from treetrain.kernels.cudnn_flex import CudnnTreeAttention, intervals

CPU = torch.device("cpu")


def seen_by(endpoints: torch.Tensor) -> torch.Tensor:
    """The mask [N, N] of endpoints [F, N]."""
    key = torch.arange(endpoints.shape[1])
    seen = key < endpoints[0][:, None]
    for begin, end in zip(endpoints[1::2], endpoints[2::2]):
        seen = seen | ((key >= begin[:, None]) & (key < end[:, None]))
    return seen


def check_endpoints(endpoints: torch.Tensor) -> None:
    """What cudnn-frontend 1.32 asks for in plan/validation.py and plan/kernels/q2k_classify.py."""
    assert endpoints.dtype == torch.int32 and endpoints.is_contiguous() and len(endpoints) % 2 == 1
    assert (endpoints >= 0).all() and (endpoints <= endpoints.shape[1]).all()
    assert (endpoints.diff(dim=0) >= 0).all(), "intervals ascend and do not overlap"


@runs(150)
@given(forests(max_rows=12, max_length=30))
def test_the_intervals_of_a_token_are_its_ancestors_and_itself(rows):
    forest = attention_forest(rows)
    if len(forest.ends):
        endpoints = torch.from_numpy(intervals(forest))
        check_endpoints(endpoints)
        assert torch.equal(seen_by(endpoints), visible(torch.from_numpy(forest.ends)))


@pytest.fixture
def stand_in(monkeypatch):
    """The two functions of cudnn.flex_attention that are called, with the arguments of version 1.32."""
    plans = []

    def create_mask_plan(mask_func, q, k, v, *, pack_gqa=None, build_backward=None):
        assert mask_func.shape[0] == 1 and mask_func.shape[2] == q.shape[1] and q.dim() == k.dim() == v.dim() == 4
        check_endpoints(mask_func[0])
        plans.append((mask_func[0], build_backward, q.shape, k.shape, v.shape))
        return plans[-1]

    def flex_attn_func(q, k, v, *, mask_plan, softmax_scale=None):
        endpoints, backward, *shapes = mask_plan
        assert shapes == [q.shape, k.shape, v.shape] and backward == q.requires_grad
        group = q.shape[2] // k.shape[2]
        wide = [x[0].transpose(0, 1) for x in (q, *(x.repeat_interleave(group, 2) for x in (k, v)))]
        scores = (wide[0] @ wide[1].transpose(1, 2) * softmax_scale).masked_fill(~seen_by(endpoints), -math.inf)
        return (scores.softmax(-1) @ wide[2]).transpose(0, 1)[None]

    module = types.ModuleType("cudnn.flex_attention")
    module.create_mask_plan, module.flex_attn_func = create_mask_plan, flex_attn_func
    monkeypatch.setitem(sys.modules, "cudnn", types.ModuleType("cudnn"))
    monkeypatch.setitem(sys.modules, "cudnn.flex_attention", module)
    return plans


def test_output_and_gradients_are_the_references_and_layers_of_one_kind_share_a_plan(stand_in):
    forest = attention_forest(bushy_rows(np.random.default_rng(0), rows=8, segment=6, levels=3))
    tensors, attention = inputs(len(forest.ends), size=16, value_size=8), CudnnTreeAttention(forest, CPU)
    for _ in range(2):
        got = both_ways(lambda q, k, v: attention(q, k, v, 0.4), tensors)
        assert max(relative_error(a, b) for a, b in zip(got, expected(forest, tensors))) <= 1e-12
    assert len(stand_in) == 1
    with torch.no_grad():
        attention(*tensors[:3], 0.4)
    assert [plan[1] for plan in stand_in] == [True, False], "a plan without backward is another"
