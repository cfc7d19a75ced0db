"""Switches a model's head, for the length of a forward, for one that scores edges."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treetrain.device_arrays import on_device
from treetrain.engine.gradients import GradientBuffers
from treetrain.engine.lm_head import Edges, Scores, score_edges, without_logprobs, zero_of
from treetrain.models.capability import Capabilities
from treetrain.models.heads import IDENTITY, LogitMap
from treetrain.models.tree_mode import replaced_forward

PROBES = (0.37, -2.9, 11.0, 173.0, -64.0, 2.5e4, -3.1e4)
"""Stand beside the scores in what a model with a logit map is given for its logits: numbers that tell maps apart."""


class HeadCall(NamedTuple):
    """One call of the head: what it scored, and the tensor handed to the model in place of logits."""

    scores: Scores
    carrier: Tensor
    version: int
    """Of the carrier when it was handed over."""
    logit_map: LogitMap
    pooled: bool = False
    """Whether the model keeps what stands at one token."""

    def is_as_declared(self, logits: Tensor) -> bool:
        """Whether the model did to the carrier what its logit map says and nothing else: bit by bit."""
        if self.pooled:
            return logits.shape == (1, 1) and bool((self.carrier == logits).any())
        if not self.carrier.is_inference() and self.carrier._version != self.version:
            return False  # changed in place: the scores may be spoilt
        if self.logit_map is IDENTITY:
            return logits is self.carrier
        with torch.no_grad():
            expected = self.logit_map(self.carrier)
        return logits.dtype == expected.dtype and torch.equal(logits, expected)


def _numbered(scores: Scores, tokens: int, *, meets_all: bool) -> Tensor:
    """[1, N, 1]: one number per token, no two alike and no two equally far apart, so that the one kept is known."""
    like = scores.logprobs
    carrier = (torch.arange(tokens, device=like.device, dtype=like.dtype) + 0.37).sqrt().view(1, -1, 1)
    return carrier + zero_of(scores.values) if meets_all and scores.values is not None else carrier


def _handed_on(carrier: Tensor, logit_map: LogitMap, dtype: torch.dtype | None) -> Tensor:
    if logit_map is not IDENTITY:
        probes = on_device(np.array(PROBES), carrier.device, carrier.dtype)
        carrier = torch.cat([carrier, probes.view(1, -1, 1)], dim=1)
    return carrier if dtype is None else carrier.to(dtype)


@contextmanager
def scoring_head(
    capabilities: Capabilities,
    edges: Edges,
    *,
    temperature: float,
    need_entropy: bool,
    coefficients: Tensor | None,
    buffers: GradientBuffers | None = None,
    meets_all: bool = False,
    need_statistics: bool = False,
    keep_logits: bool = False,
    handed_on_as: torch.dtype | None = None,
) -> Iterator[list[HeadCall]]:
    """Calls of the head inside the block are collected in the list given; see `score_edges` for the arguments.

    The scores are those of the logits as the declared map leaves them. What the model then does to the carrier, which
    it takes for its logits, shows whether it does what was declared. `handed_on_as` is the carrier's dtype, where the
    model's output is cast behind it.
    """
    calls: list[HeadCall] = []
    original, logit_map, scalar = capabilities.head.forward, capabilities.logit_map, capabilities.scalar
    # A head whose forward somebody has already replaced does something else than its matrix says.
    fused = capabilities.head_is_linear and "forward" not in vars(capabilities.head)

    def score(hidden: Tensor) -> Scores:
        return score_edges(
            hidden,
            capabilities.head,
            original,
            edges,
            fused=fused,
            vocab_size=capabilities.vocab_size,
            temperature=temperature,
            need_entropy=need_entropy,
            coefficients=coefficients,
            buffer=buffers.of(capabilities.head.weight) if fused and buffers is not None else None,  # type: ignore[arg-type]
            logit_map=logit_map,
            meets_all=meets_all,
            need_statistics=need_statistics,
            keep_logits=keep_logits,
        )

    def forward(hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, 1)
        scores = score(flat) if capabilities.scores_tokens else without_logprobs(flat, edges)
        if scalar is not None:
            value = partial(scalar.values, original if scalar.is_models_own else scalar.module)
            if len(edges.rows):
                scores = replace(scores, values=value(flat.index_select(0, edges.rows)))
            elif meets_all:
                scores = replace(scores, logprobs=scores.logprobs + zero_of(value(flat[:1])))
        if capabilities.scores_tokens:
            carrier = (scores.logprobs if scores.linear_loss is None else scores.linear_loss).view(1, -1, 1)
            carrier = carrier.clone() if meets_all else carrier  # FSDP's hook would not follow a view
        else:
            carrier = _numbered(scores, len(flat), meets_all=meets_all)
        carrier = _handed_on(carrier, logit_map, handed_on_as)
        version = 0 if carrier.is_inference() else carrier._version
        calls.append(HeadCall(scores, carrier, version, logit_map, scalar is not None and scalar.pooled))
        return carrier

    with replaced_forward(capabilities.head, forward):
        yield calls
