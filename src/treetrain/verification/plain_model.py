"""The plain side of `verify`: loss and gradients row by row, by the model's own forward."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from treetrain.data.trajectory import Trajectory
from treetrain.engine.loss import PackedLoss, needs_logprobs
from treetrain.engine.packed import model_device
from treetrain.engine.routing import RouterBalance, by_place, route_as_recorded
from treetrain.models.capability import check_model
from treetrain.models.moe import MixtureOfExperts
from treetrain.models.tree_mode import replaced_forward

Scores = tuple[Tensor, Tensor | None, Tensor | None]
"""[L - 1] log-probabilities, entropies and values of a row; values are at the tokens before the predicted ones."""


class PlainModel:
    """A model's own forward, one row at a time; its routers use the experts recorded in the row.

    Args:
        model: a causal LM, or a critic.
        value_head: computes values from the inputs of a causal LM's head.
        temperature: divides the logits.
    """

    def __init__(self, model: nn.Module, value_head: nn.Module | None = None, temperature: float = 1.0):
        capabilities = check_model(model, critics=True)
        self._model, self._value_head, self._temperature = model, value_head, temperature
        self._head, self._experts = capabilities.head, capabilities.experts
        self._wide = torch.promote_types(model.dtype, torch.float32)  # type: ignore[arg-type]

    def accumulate_gradients(self, rows: Sequence[Trajectory], loss: PackedLoss, normaliser: float) -> float:
        """Add a step's gradients to ``.grad``; returns its loss."""
        summed = 0.0
        if loss.scope == "batch":
            scored = []
            for row in rows:
                with self._routed(row):
                    scored.append(self._scores(row, loss))
            lists = [None if column[0] is None else list(column) for column in zip(*scored)]
            total, _ = loss(lists[0], lists[1], list(rows), values=lists[2])
            (total / normaliser).backward()
            summed = float(total.detach())
        else:
            for row in rows:
                if not loss.reads_untrained and not row.weights.any():
                    continue
                with self._routed(row):
                    logprobs, entropies, values = self._scores(row, loss)
                    total, _ = loss(logprobs, entropies, row, values=values)
                    if total.requires_grad:
                        (total / normaliser).backward()
                summed += float(total.detach())
        return summed / normaliser + self._accumulate_auxiliary_gradients([row for row in rows if len(row)])

    def _scores(self, row: Trajectory, loss: PackedLoss) -> Scores:
        entropy, valued = "entropies" in loss.needs, "predicted_values" in loss.needs
        if len(row) < 2:
            nothing = torch.zeros(0, dtype=self._wide, device=model_device(self._model))
            return nothing, nothing if entropy else None, nothing if valued else None
        ids, seen = self._ids(row), {}
        hook = self._head.register_forward_hook(lambda _, given, made: seen.update(hidden=given[0], made=made))
        try:
            logits = self._model(input_ids=ids, use_cache=False).logits
        finally:
            hook.remove()
        values = self._values(seen) if valued else None
        if not needs_logprobs(loss):
            return torch.zeros(len(row) - 1, dtype=self._wide, device=ids.device), None, values
        log_p = (logits[0, :-1].to(self._wide) / self._temperature).log_softmax(-1)
        logprobs = log_p.gather(1, ids[0, 1:, None]).squeeze(1)
        return logprobs, -(log_p.exp() * log_p).sum(-1) if entropy else None, values

    def _values(self, seen: dict[str, Tensor]) -> Tensor:
        """[L - 1] or [L - 1, c], from the inputs and outputs of the model's head."""
        if self._value_head is None:
            # A model for sequence classification returns the last token's value alone; its head computes all.
            values = seen["made"][0, :-1]
        else:
            parameter = next(self._value_head.parameters(), seen["hidden"])
            values = self._value_head(seen["hidden"][0, :-1].to(parameter.dtype))
        return (values.squeeze(1) if values.dim() == 2 and values.shape[1] == 1 else values).to(self._wide)

    def _ids(self, row: Trajectory) -> Tensor:
        return torch.from_numpy(row.ids).long().unsqueeze(0).to(model_device(self._model))

    # ---- Mixtures of experts ----

    @contextmanager
    def _routed(self, row: Trajectory) -> Iterator[None]:
        """Route to the row's recorded experts inside the block, which must include the backward."""
        experts = self._experts
        recorded = None if experts is None else by_place(experts, row.experts)
        with ExitStack() as stack:
            if experts is not None and recorded is not None:
                taken = torch.from_numpy(recorded).to(model_device(self._model))
                for router in experts.routers:
                    own = taken[:, router.place]
                    forward = partial(route_as_recorded, router, own, experts, router.module.forward)
                    stack.enter_context(replaced_forward(router.module, forward))
            yield

    @torch.no_grad()
    def with_experts(self, rows: Sequence[Trajectory]) -> list[Trajectory]:
        """The rows with the experts that this model chooses, for rows that have none recorded."""
        experts = self._experts
        if experts is None or experts.experts is None or experts.top_k is None:
            return list(rows)
        return [row if row.experts is not None or not len(row) else self._with_experts(row, experts) for row in rows]

    def _with_experts(self, row: Trajectory, experts: MixtureOfExperts) -> Trajectory:
        chosen: dict[int, Tensor] = {}

        def note(place: int, _module: nn.Module, _args: Any, output: Any) -> None:
            chosen[place] = output[-1] if isinstance(output, tuple) else output

        with ExitStack() as stack:
            for router in experts.routers:
                stack.callback(router.module.register_forward_hook(partial(note, router.place)).remove)
            self._model(input_ids=self._ids(row), use_cache=False)
        shape = (len(row), experts.top_k)
        usual = all(tuple(x.shape) == shape and not x.is_floating_point() for x in chosen.values())
        if not usual or len(chosen) != experts.places:
            return row  # other kinds of routers are left alone
        return row.replace(experts=torch.stack([chosen[place] for place in sorted(chosen)], 1).cpu().numpy())

    def _accumulate_auxiliary_gradients(self, rows: Sequence[Trajectory]) -> float:
        """Add the gradient of the routers' auxiliary loss of all rows, times its coefficient; returns that product.

        The choices have no gradient. Their counts over all rows are computed first; then the backward runs row by row.
        """
        experts = self._experts
        if experts is None or not experts.auxiliary or not rows:
            return 0.0
        assert experts.top_k is not None
        whole: RouterBalance | None = None
        for row in rows:
            with torch.no_grad(), self._routed(row):
                balance = RouterBalance.of(self._probabilities(row), experts.top_k)
            whole = balance if whole is None else whole + balance
        assert whole is not None
        slope = experts.auxiliary * len(whole.choices) * whole.choices / whole.tokens**2
        for row in rows:
            with self._routed(row):
                loss = self._probabilities(row).double().sum(0) @ slope
                if loss.requires_grad:
                    loss.backward()
        return experts.auxiliary * float(whole.loss)

    def _probabilities(self, row: Trajectory) -> Tensor:
        """[layers * L, E] of one row."""
        logits = self._model(input_ids=self._ids(row), use_cache=False, output_router_logits=True).router_logits
        return torch.cat([layer.to(logits[0].device) for layer in logits]).softmax(-1)
