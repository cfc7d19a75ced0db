"""Gradients that FSDP2 has not reduced are dropped in whatever form a version of torch keeps them."""

from types import SimpleNamespace

import pytest
import torch

from treetrain.parallel import process_group


class BesideTheGradient:
    """A weight as torch until 2.14 keeps it: gradients accumulated in another dtype lie beside the parameter's own."""

    def __init__(self) -> None:
        self._unsharded_param = torch.nn.Parameter(torch.zeros(2))
        self.unsharded_accumulated_grad: torch.Tensor | None = torch.ones(2)


class ViewOfTheGradient:
    """A weight as torch from 2.15 on keeps it: the accumulated gradient is the parameter's own, and cannot be set."""

    def __init__(self) -> None:
        self._unsharded_param = torch.nn.Parameter(torch.zeros(2))
        self._unsharded_param.grad = torch.ones(2)

    @property
    def unsharded_accumulated_grad(self) -> torch.Tensor | None:
        return self._unsharded_param.grad


class NeverGathered:
    """A weight that took no part in a forward: FSDP2 has made no whole parameter of it."""

    unsharded_accumulated_grad = None


@pytest.mark.parametrize("kind", [BesideTheGradient, ViewOfTheGradient])
def test_unreduced_gradients_are_dropped_wherever_torch_keeps_them(monkeypatch, kind):
    weights = [kind(), NeverGathered()]
    state = SimpleNamespace(_fsdp_param_group=SimpleNamespace(fsdp_params=weights))
    module = SimpleNamespace(_get_fsdp_state=lambda: state)
    monkeypatch.setattr(process_group, "sharded_modules", lambda *modules: [module])
    assert process_group.waiting_gradients() == weights[:1]
    process_group.drop_waiting_gradients()
    assert process_group.waiting_gradients() == []
    assert weights[0].unsharded_accumulated_grad is None and weights[0]._unsharded_param.grad is None
