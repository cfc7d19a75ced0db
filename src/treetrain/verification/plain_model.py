"""The plain side of `verify`: loss and gradients row by row, by the model's own forward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from treetrain.data.trajectory import Trajectory
from treetrain.engine.loss import PackedLoss, needs_logprobs
from treetrain.engine.packed import model_device
from treetrain.engine.router_balance import RouterBalance
from treetrain.engine.routing import by_place, route_as_recorded
from treetrain.models.capability import causal_lm, check_model
from treetrain.models.moe import Router
from treetrain.models.tree_mode import replaced_forward


class RowScores(NamedTuple):
    """One row's L - 1 predictions."""

    logprobs: Tensor
    entropies: Tensor | None
    values: Tensor | None
    """At the tokens before the predicted ones."""


class RowScorer:
    """Computes of a row what a loss needs: log-probabilities, entropies, values."""

    def __init__(self, model: nn.Module, value_head: nn.Module | None, loss: PackedLoss, temperature: float):
        self.model, self.value_head, self.temperature = model, value_head, temperature
        self.needs_entropy, self.needs_values = "entropies" in loss.needs, "predicted_values" in loss.needs
        self.needs_logprobs = needs_logprobs(loss)
        self._wide = torch.promote_types(model.dtype, torch.float32)  # type: ignore[arg-type]
        self._head_input: Tensor | None = None

    def __call__(self, row: Trajectory) -> RowScores:
        """Scores with gradients."""
        nothing = torch.zeros(0, dtype=self._wide, device=model_device(self.model))
        if len(row) < 2:
            return RowScores(nothing, nothing, nothing)
        ids = torch.from_numpy(row.ids).long().unsqueeze(0).to(nothing.device)
        logits = self._logits(ids)
        values = self._values(logits) if self.needs_values else None
        if not self.needs_logprobs:
            return RowScores(nothing.new_zeros(len(row) - 1), None, values)
        log_p = (logits[0, :-1].to(self._wide) / self.temperature).log_softmax(-1)
        logprobs = log_p.gather(1, ids[0, 1:, None]).squeeze(1)
        return RowScores(logprobs, -(log_p.exp() * log_p).sum(-1) if self.needs_entropy else None, values)

    def _logits(self, ids: Tensor) -> Tensor:
        """[1, L, ...]: what the model gives; takes note of what its language-model head is given."""
        if self.value_head is None:
            # A model for sequence classification gives the last token's value alone, so the head is asked itself.
            return self._hooked(self._own_head(), ids, outputs=True)
        return self._hooked(causal_lm(self.model).get_output_embeddings(), ids, outputs=False)  # type: ignore[operator]

    def _own_head(self) -> nn.Module | None:
        lm = causal_lm(self.model)
        if lm.get_output_embeddings() is not None:  # type: ignore[operator]
            return None
        return getattr(lm, "score", None) or getattr(lm, "classifier", None)

    def _hooked(self, head: nn.Module | None, ids: Tensor, *, outputs: bool) -> Tensor:
        if head is None:
            return self.model(input_ids=ids, use_cache=False).logits
        seen: list[Any] = []
        handle = head.register_forward_hook(lambda _, given, made: seen.append(made if outputs else given[0]))
        try:
            logits = self.model(input_ids=ids, use_cache=False).logits
        finally:
            handle.remove()
        if outputs:
            return seen[0]
        self._head_input = seen[0]
        return logits

    def _values(self, logits: Tensor) -> Tensor:
        """[L - 1] or [L - 1, c]."""
        if self.value_head is None:
            found = logits[0, :-1]
        else:
            assert self._head_input is not None
            first = next(self.value_head.parameters(), None)
            hidden = self._head_input[0, :-1]
            found = self.value_head(hidden if first is None else hidden.to(first.dtype))
        return (found.squeeze(1) if found.dim() == 2 and found.shape[1] == 1 else found).to(self._wide)


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


def linear_gradients(
    model: nn.Module,
    trajectories: Sequence[Trajectory],
    loss: PackedLoss,
    normaliser: float,
    temperature: float,
    value_head: nn.Module | None = None,
) -> float:
    """Accumulate gradients row by row with the plain model; returns the loss."""
    experts = PlainExperts(model)
    scorer = RowScorer(model, value_head, loss, temperature)
    return experts.add_auxiliary_gradients(trajectories) + _loss_gradients(
        scorer, trajectories, loss, normaliser, experts
    )


def _loss_gradients(
    scorer: RowScorer, trajectories: Sequence[Trajectory], loss: PackedLoss, normaliser: float, experts: PlainExperts
) -> float:
    if loss.scope == "batch":
        scored = []
        for row in trajectories:
            with experts.of(row):
                scored.append(scorer(row))
        entropies = [row.entropies for row in scored] if scorer.needs_entropy else None
        values = [row.values for row in scored] if scorer.needs_values else None
        total, _ = loss([row.logprobs for row in scored], entropies, list(trajectories), values=values)
        (total / normaliser).backward()
        return float(total.detach()) / normaliser
    summed = 0.0
    for row in trajectories:
        if not loss.reads_untrained and not row.weights.any():
            continue
        with experts.of(row):
            scores = scorer(row)
            total, _ = loss(scores.logprobs, scores.entropies, row, values=scores.values)
            if total.requires_grad:
                (total / normaliser).backward()
        summed += float(total.detach())
    return summed / normaliser
