"""Switches a model's head, for the length of a forward, for one that scores edges."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from treetrain.engine.head import Edges, Scores, score_edges
from treetrain.engine.sinks import Sinks
from treetrain.models.capability import Capabilities
from treetrain.models.logit_map import IDENTITY, LogitMap
from treetrain.models.switch import replaced_forward

PROBES = (0.37, -2.9, 11.0, 173.0, -64.0, 2.5e4, -3.1e4)
"""Stand beside the scores in what a model with a logit map is given for its logits: numbers that tell maps apart."""


class HeadCall(NamedTuple):
    """One call of the head: what it scored, and the tensor handed to the model in place of logits."""

    scores: Scores
    carrier: Tensor
    version: int
    """Of the carrier when it was handed over."""
    logit_map: LogitMap

    def is_as_declared(self, logits: Tensor) -> bool:
        """Whether the model did to the carrier what its logit map says and nothing else: bit by bit."""
        if not self.carrier.is_inference() and self.carrier._version != self.version:
            return False  # changed in place: the scores may be spoilt
        if self.logit_map is IDENTITY:
            return logits is self.carrier
        with torch.no_grad():
            expected = self.logit_map(self.carrier)
        return logits.dtype == expected.dtype and torch.equal(logits, expected)


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

    The scores are those of the logits as the declared map leaves them. What the model then does to the carrier, which
    it takes for its logits, shows whether it does what was declared.
    """
    calls: list[HeadCall] = []
    original, logit_map = capabilities.head.forward, capabilities.logit_map
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
            logit_map=logit_map,
        )
        live = scores.logprobs if scores.linear_loss is None else scores.linear_loss
        carrier = live.view(1, -1, 1)
        if logit_map is not IDENTITY:
            carrier = torch.cat([carrier, carrier.new_tensor(PROBES).view(1, -1, 1)], dim=1)
        calls.append(HeadCall(scores, carrier, 0 if carrier.is_inference() else carrier._version, logit_map))
        return carrier

    with replaced_forward(capabilities.head, forward):
        yield calls
