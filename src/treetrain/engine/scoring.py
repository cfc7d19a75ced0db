"""Switches a model's head, for the length of a forward, for one that scores edges."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from treetrain.engine.head import Edges, Scores, score_edges
from treetrain.engine.sinks import Sinks
from treetrain.models.capability import Capabilities
from treetrain.models.switch import replaced_forward


class HeadCall(NamedTuple):
    """One call of the head: what it scored, and the tensor handed to the model in place of logits."""

    scores: Scores
    carrier: Tensor
    version: int
    """Of the carrier when it was handed over."""

    def is_untouched(self, logits: Tensor) -> bool:
        """Whether the model returned the carrier itself, not changed in place either."""
        return logits is self.carrier and (logits.is_inference() or logits._version == self.version)


@contextmanager
def scoring_head(
    capabilities: Capabilities,
    edges: Edges,
    *,
    temperature: float,
    need_entropy: bool,
    coefficients: Tensor | None,
    sinks: Sinks | None = None,
) -> Iterator[list[HeadCall]]:
    """Calls of the head inside the block are collected in the list given; see `score_edges` for the arguments.

    A model that returns the carrier itself as its logits does nothing to them after the head.
    """
    calls: list[HeadCall] = []
    original = capabilities.head.forward
    # A head whose forward somebody has already replaced does something else than its matrix says.
    fused = capabilities.head_is_linear and "forward" not in vars(capabilities.head)

    def forward(hidden: Tensor) -> Tensor:
        scores = score_edges(
            hidden.flatten(0, 1),
            capabilities.head,
            original,
            edges,
            fused=fused,
            vocab_size=capabilities.vocab_size,
            temperature=temperature,
            need_entropy=need_entropy,
            coefficients=coefficients,
            sink=sinks.of(capabilities.head.weight) if fused and sinks is not None else None,  # type: ignore[arg-type]
        )
        live = scores.logprobs if scores.linear_loss is None else scores.linear_loss
        carrier = live.view(1, -1, 1)
        calls.append(HeadCall(scores, carrier, 0 if carrier.is_inference() else carrier._version))
        return carrier

    with replaced_forward(capabilities.head, forward):
        yield calls
