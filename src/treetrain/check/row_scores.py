"""The linear reference: scores of a row by the plain model, alone, from its full logits.

All comparisons of a tree with the plain model score through this file: `tt.verify`, the first step of a trainer, the
engine's first use of a model, and the tests' references.
"""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

POSITIONS = 64
"""How many positions' logits are widened at once."""


def scores_of_logits(
    logits: Float[Tensor, "T V"], targets: Int64[Tensor, " T"], temperature: float = 1.0, *, entropy: bool = False
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"] | None]:
    """Log-probabilities of tokens, and entropies of their distributions, from logits; differentiable.

    Logits are scored in float64. `log_softmax` in float32 is biased over large vocabularies, on a CPU by 5e-6 in the
    mean over 150,000 entries: more than the rest of a model's rounding.

    A few positions are widened at a time, and again in backward, so no copy of the logits is held.

    Returns:
        in nats, float32 or wider; the entropies are None unless asked for.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)

    def scores(some: Float[Tensor, "t V"], target: Int64[Tensor, " t"]) -> tuple[Tensor, ...]:
        log_p = (some.double() / temperature).log_softmax(-1)
        logprobs = log_p.gather(1, target[:, None])[:, 0].to(wide)
        return (logprobs, -(log_p.exp() * log_p).sum(-1).to(wide)) if entropy else (logprobs,)

    nothing = (logits.new_zeros(0, dtype=wide),) * (1 + entropy)
    again = torch.is_grad_enabled() and logits.requires_grad
    chunks = [
        checkpoint(scores, *chunk, use_reentrant=False, preserve_rng_state=False) if again else scores(*chunk)
        for chunk in zip(logits.split(POSITIONS), targets.split(POSITIONS))
    ]
    logprobs, *entropies = (torch.cat(column) for column in zip(nothing, *chunks))
    return logprobs, entropies[0] if entropies else None


def score_row(
    model: nn.Module, ids: Int64[Tensor, " L"], temperature: float = 1.0, *, entropy: bool = False, **inputs: Any
) -> tuple[Float[Tensor, " L-1"], Float[Tensor, " L-1"] | None]:
    """Log-probabilities (and entropies) of a row's tokens but the first, by the model's own forward on the row alone.

    Args:
        ids: on the model's device; at least two tokens.
        inputs: further arguments of the model's forward, such as its images.
    """
    logits = model(input_ids=ids[None], use_cache=False, **inputs).logits[0, :-1]
    return scores_of_logits(logits, ids[1:], temperature, entropy=entropy)
