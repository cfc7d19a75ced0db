"""The plain side of a check of a mixture of experts: recorded experts and the auxiliary loss, row by row."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from treetrain.data.trajectory import Trajectory
from treetrain.engine.packed import model_device
from treetrain.engine.router_balance import RouterBalance
from treetrain.engine.routing import by_place, route_as_recorded
from treetrain.models.capability import check_model
from treetrain.models.moe import Router
from treetrain.models.switch import replaced_forward


class PlainExperts:
    """A plain model's experts; nothing is done for a model without."""

    def __init__(self, model: nn.Module):
        self._model, self._experts = model, check_model(model, critics=True).experts

    @contextmanager
    def of(self, row: Trajectory) -> Iterator[None]:
        """The routers take the row's recorded experts; keep it open over the backward too."""
        recorded = None if self._experts is None else by_place(self._experts, row.experts)
        with ExitStack() as stack:
            if self._experts is not None and recorded is not None:
                taken = torch.from_numpy(recorded).to(model_device(self._model))
                for router in self._experts.routers:
                    forward = self._replaying(router, taken[:, router.place])
                    stack.enter_context(replaced_forward(router.module, forward))
            yield

    def _replaying(self, router: Router, recorded: Tensor) -> Callable[..., Any]:
        original, experts = router.module.forward, self._experts
        assert experts is not None

        def forward(*args: Any, **kwargs: Any) -> Any:
            return route_as_recorded(router, recorded, experts, original, *args, **kwargs)

        return forward

    def recorded(self, rows: Sequence[Trajectory]) -> list[Trajectory]:
        """The rows with the experts that the model sends their tokens to, where none are recorded yet."""
        if self._experts is None or self._experts.experts is None or self._experts.top_k is None:
            return list(rows)
        return [row if row.experts is not None or not len(row) else self._recorded(row) for row in rows]

    def _recorded(self, row: Trajectory) -> Trajectory:
        assert self._experts is not None
        chosen: dict[int, Tensor] = {}

        def noting(router: Router) -> Callable[..., None]:
            def note(_module: nn.Module, _args: Any, output: Any) -> None:
                chosen[router.place] = output[-1] if isinstance(output, tuple) else output

            return note

        with ExitStack() as stack, torch.no_grad():
            for router in self._experts.routers:
                stack.callback(router.module.register_forward_hook(noting(router)).remove)
            self._model(input_ids=self._ids(row), use_cache=False)
        expected = (len(row), self._experts.top_k)
        usual = all(tuple(x.shape) == expected and not x.is_floating_point() for x in chosen.values())
        if not usual or len(chosen) != self._experts.places:
            return row  # routers of another form: left to themselves
        return row.replace(experts=torch.stack([chosen[place] for place in sorted(chosen)], 1).cpu().numpy())

    def add_auxiliary_gradients(self, rows: Sequence[Trajectory]) -> float:
        """Accumulate the gradient of the coefficient times the auxiliary loss of all rows; returns that product."""
        coefficient = 0.0 if self._experts is None else self._experts.auxiliary
        rows = [row for row in rows if len(row)]
        if not coefficient or not rows:
            return 0.0
        assert self._experts is not None and self._experts.top_k is not None
        whole: RouterBalance | None = None
        for row in rows:
            with torch.no_grad(), self.of(row):
                found = RouterBalance.of(self._probabilities(row), self._experts.top_k)
            whole = found if whole is None else whole + found
        assert whole is not None
        slope = coefficient * len(whole.choices) * whole.choices / whole.tokens**2
        for row in rows:
            with self.of(row):
                loss = self._probabilities(row).double().sum(0) @ slope
                if loss.requires_grad:
                    loss.backward()
        return coefficient * float(whole.loss)

    def _probabilities(self, row: Trajectory) -> Tensor:
        """[layers * L, E] of one row."""
        logits = self._model(input_ids=self._ids(row), use_cache=False, output_router_logits=True).router_logits
        return torch.cat([layer.to(logits[0].device) for layer in logits]).softmax(-1)

    def _ids(self, row: Trajectory) -> Tensor:
        return torch.from_numpy(row.ids).long().unsqueeze(0).to(model_device(self._model))
