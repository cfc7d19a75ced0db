"""Finds the layers of a model that a dense one lacks."""

from torch import nn

from treetrain.core.hf.capability import Capabilities, Finder
from treetrain.core.hf.capability import check_model as check_with
from treetrain.layers.experts.routers import check_experts
from treetrain.layers.recurrence.recurrent_layers import check_recurrence
from treetrain.layers.wrapped import check_compiled, check_wrapped

FINDERS: tuple[Finder, ...] = (check_wrapped, check_recurrence, check_experts)


def check_model(model: nn.Module, *, critics: bool = False, value_head: nn.Module | None = None) -> Capabilities:
    """`core.hf.capability.check_model` with all layers that are known here."""
    check_compiled(model)  # first, since nothing else can be read through such a module
    return check_with(model, critics=critics, value_head=value_head, finders=FINDERS)
