"""Small random models of real transformers classes, made from the registry of families."""

import torch
from torch import nn

from support.families import BASE as BASE
from support.families import DENSE, make_family
from support.families import build as build

FAMILIES = DENSE
"""Families whose every layer has full attention and a plain MLP."""


def make_model(family: str = "qwen3", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes) -> nn.Module:
    """A model of any family, in eval mode, its weights exact in bfloat16; see `make_family`."""
    return make_family(family, dtype, seed, **changes)
