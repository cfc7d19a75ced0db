"""Whether PyTorch's settings allow the Triton kernels less than float32 precision."""

import pytest
import torch

from treetrain.kernels.launch import tf32_is_allowed


@pytest.fixture(autouse=True)
def _as_before():
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = "ieee"  # so that the older setting can be read and set again
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = before


def test_float32_is_multiplied_exactly_unless_either_setting_allows_less():
    assert not tf32_is_allowed()
    for name, allowed in (("high", True), ("medium", True), ("highest", False)):
        torch.set_float32_matmul_precision(name)
        assert tf32_is_allowed() == allowed, name
    for name, allowed in (("tf32", True), ("ieee", False)):
        torch.backends.cuda.matmul.fp32_precision = name
        assert tf32_is_allowed() == allowed, name
