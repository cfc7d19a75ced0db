"""What a plain model says of one row: by its own forward, with nothing of the tree's."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from treetrain.data.trajectory import Trajectory
from treetrain.engine.packed import model_device
from treetrain.models.capability import causal_lm


class RowScores(NamedTuple):
    """Of the L - 1 predictions of a row."""

    logprobs: Tensor
    entropies: Tensor | None
    values: Tensor | None
    """Of the states before the predicted tokens."""


class RowScorer:
    """Scores rows as far as a loss needs them."""

    def __init__(self, model: nn.Module, value_head: nn.Module | None, loss: Any, temperature: float):
        self.model, self.value_head, self.temperature = model, value_head, temperature
        self.needs_entropy = bool(getattr(loss, "needs_entropy", False))
        self.needs_values = bool(getattr(loss, "needs_values", False))
        self.needs_logprobs = self.needs_entropy or bool(getattr(loss, "needs_logprobs", True))
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
