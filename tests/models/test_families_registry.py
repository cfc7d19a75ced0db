"""The registry of families gives models on which a mistake would be seen."""

import pytest
import torch

from support.models import FAMILIES, make_model
from treetrain.check.contract import as_dtype
from treetrain.check.forests import VOCAB


@pytest.mark.few(12)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_one_model_in_every_dtype_and_nothing_in_it_is_neutral(name):
    model = make_model(name, torch.bfloat16)
    assert model.config.vocab_size == VOCAB
    for key, parameter in model.named_parameters():
        assert parameter.isfinite().all(), key
        assert parameter.numel() == 1 or (parameter != parameter.flatten()[0]).any(), f"{key} holds one value"
    single = make_model(name, torch.float32)
    for (key, low), high in zip(model.named_parameters(), single.parameters()):
        assert torch.equal(low.float(), high), key
    assert as_dtype(model, torch.float64)(torch.arange(9)[None], use_cache=False).logits.isfinite().all()
