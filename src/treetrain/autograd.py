"""Log-probabilities, values and rewards live in autograd, in one node for a whole batch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from treetrain.core.engine.deferred import gradients_aside
from treetrain.core.engine.loss_gradients import Mask
from treetrain.core.engine.score import Scored
from treetrain.core.planning.make import Bytes
from treetrain.core.tree.token_tree import Row, TokenTree
from treetrain.engine import TreeEngine


def logprobs(
    model: nn.Module,
    sequences: Sequence[Row] | TokenTree,
    budget: int | str | Bytes | None = None,
    temperature: float = 1.0,
    *,
    return_entropy: bool = False,
    return_values: bool = False,
    value_head: nn.Module | None = None,
    mask: Mask | None = None,
) -> Any:
    """Log-probability of every token but the first of every sequence; every shared prefix is computed once.

    Args:
        model: a Hugging Face causal LM, plain or wrapped by peft.
        sequences: K lists or arrays of token ids (or trajectories, or a tree).
        budget: tokens whose graph is alive at once, or bytes ("8GiB") of peak memory; None takes the free memory. A
            batch that fits runs as a whole, a larger one in parts: the graphs that fit are kept, and backward runs the
            other parts again. Existing ``.grad`` stays allocated in backward; a budget in bytes does not count it.
        temperature: divides the logits before the softmax.
        return_entropy: also give the entropy of the distribution each token was drawn from.
        return_values: also give the value of the state before each of these tokens, by `value_head` on the same
            forward. `tt.values` gives values only.
        value_head: maps the inputs of the model's LM head, [n, hidden], to values [n] or [n, c].
        mask: K rows [L_k - 1], bools or weights: predictions whose entry is 0 are not computed; they hold 0 and get no
            gradient. None computes all.

    Returns:
        K tensors [L_k - 1], in nats, float32 or wider, with gradients to the model's parameters (and the value
        head's); ``return_entropy`` and ``return_values`` each add a list ([L_k - 1, c] for several values); the
        result is then a tuple. ``.backward()`` and ``torch.autograd.grad`` both work, once.

    Raises:
        DataError: an id outside the vocabulary or a row longer than the model's positions.
        UnsupportedModel: the model, or a setting of it, would not be exact on a tree; or gradients are wanted and
            several processes train together, which autograd would not synchronise, or the model's configuration asks
            for the routers' auxiliary loss (use `TreeEngine.score` in both cases).
        ValueError: a budget that is neither tokens nor bytes, or bytes that no plan fits into.
        RuntimeError: in a second backward, or if weights, the active adapter or ``requires_grad`` changed since the
            forward.
    """
    engine = TreeEngine(model, budget=budget, temperature=temperature, value_head=value_head)
    scored = engine._scored(
        "treetrain.logprobs",
        sequences,
        in_autograd=True,
        logprobs=True,
        values="predictions" if return_values else None,
        entropies=return_entropy,
        mask=mask,
    )
    rest, results = within_autograd(scored), []
    for leaves in (scored.logprobs, scored.entropies, scored.values):
        if leaves is not None:
            results.append(rest[: len(leaves)])
            rest = rest[len(leaves) :]
    return results[0] if len(results) == 1 else tuple(results)


def values(
    model: nn.Module,
    sequences: Sequence[Row] | TokenTree,
    budget: int | str | Bytes | None = None,
    *,
    head: nn.Module | None = None,
) -> list[Float[Tensor, " _ *c"]]:
    """The value of every token's state, for every sequence; every shared prefix is computed once.

    Entry t of a row is the value of the state after its tokens 0 to t, before token t + 1 is known. `values` and
    `returns` of a `Trajectory` are indexed by the predicted token instead: ``values[t + 1]`` there is entry t here.

    Args:
        model: a model for token classification (a critic) or sequence classification (a reward model), plain or wrapped
            by peft; or, with `head`, a causal LM.
        sequences, budget: as for `treetrain.logprobs`.
        head: maps the inputs of a causal LM's head, [n, hidden], to values [n] or [n, c].

    Returns:
        K tensors [L_k], or [L_k, c] for a head of several labels, float32 or wider, with gradients to the parameters of
        model and head. ``.backward()`` and ``torch.autograd.grad`` both work, once.

    Raises:
        DataError, UnsupportedModel, ValueError, RuntimeError: as `treetrain.logprobs`.
    """
    return within_autograd(_scored_values("treetrain.values", model, sequences, budget, head, "states"))


def rewards(
    model: nn.Module,
    sequences: Sequence[Row] | TokenTree,
    budget: int | str | Bytes | None = None,
    *,
    head: nn.Module | None = None,
) -> Float[Tensor, " K *c"]:
    """Rewards of sequences by a reward model: the value at the last token; every shared prefix is computed once.

    A sequence-classification model reads the last token that is not its ``pad_token_id`` (the first token if all are),
    as it does in transformers. Any other model reads the last token.

    Args:
        model, sequences, budget, head: as `values`.

    Returns:
        One value for each sequence, or c of them for a head of c labels; differentiable like `values`.

    Raises:
        DataError: a sequence without tokens; otherwise as `values`.
    """
    return within_autograd(_scored_values("treetrain.rewards", model, sequences, budget, head, "rewards"))[0]


def _scored_values(
    name: str,
    model: nn.Module,
    sequences: Sequence[Row] | TokenTree,
    budget: int | str | Bytes | None,
    head: nn.Module | None,
    values: Literal["states", "rewards"],
) -> Scored:
    engine = TreeEngine(model, budget=budget, value_head=head)
    return engine._scored(name, sequences, logprobs=False, values=values, in_autograd=True)


def within_autograd(scored: Scored, within: Callable[[], AbstractContextManager[object]] = nullcontext) -> list[Tensor]:
    """The leaves as outputs of one autograd node whose inputs are the parameters.

    Args:
        within: makes the context of the tree's backward, which runs parts of the model again.
    """
    if not scored.live or not scored.computed_tokens:
        return scored.leaves
    parameters = [p for p in scored.parameters if p.requires_grad]
    return list(_TreeScores.apply(scored, parameters, within, *parameters))  # type: ignore[call-overload]


class _TreeScores(torch.autograd.Function):
    """A whole batch as one autograd node whose inputs are the parameters.

    The tree's own graph is not part of the outer graph. So its backward can run in tree mode, which activation
    checkpointing needs when it recomputes layers.
    """

    @staticmethod
    def forward(ctx, scored: Scored, parameters: list[nn.Parameter], within: Callable[[], Any], *_: Tensor):
        ctx.given = scored, parameters, within
        ctx.set_materialize_grads(False)
        return tuple(leaf.detach().clone() for leaf in scored.leaves)  # the caller may write into them

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor | None):
        scored, parameters, within = ctx.given
        for leaf, gradient in zip(scored.leaves, gradients):
            leaf.grad = gradient
        with within():
            found = gradients_of(parameters, partial(scored.backward, sync=False))
        return None, None, None, *found


def gradients_of(parameters: Sequence[nn.Parameter], run: Callable[[], None]) -> tuple[Tensor | None, ...]:
    """Return the gradients that a call leaves in ``.grad``, and restore ``.grad``. No hook of the parameters runs."""
    with gradients_aside(parameters) as found:
        run()
    return tuple(found)
