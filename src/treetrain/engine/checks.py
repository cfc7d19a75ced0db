"""Checks of a step: something can be trained, its loss is a loss, and what that is divided by is above 0."""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from treetrain.data.trajectory import Trajectory
from treetrain.tree.token_tree import TokenTree


def check_trainable(parameters: Sequence[nn.Parameter]) -> None:
    """Raise ValueError where a backward could not reach any parameter."""
    if not torch.is_grad_enabled():
        raise ValueError("gradients are switched off (torch.no_grad); use .logprobs, or leave that block")
    if not any(p.requires_grad for p in parameters):
        raise ValueError("every parameter of the model is frozen (requires_grad=False); nothing can be trained")


def step_loss(loss: Any, trajectories: Sequence[Trajectory], normaliser: float | None) -> Any:
    """The loss with what it must know of the whole step, which these trajectories are unless a normaliser is given.

    Raises:
        ValueError: a part of a step, and a loss that was not told of the whole one.
    """
    if normaliser is None:
        return loss.for_step(trajectories) if hasattr(loss, "for_step") else loss
    if getattr(loss, "needs_step", False):
        raise ValueError(
            f"{type(loss).__name__} was given a normaliser, so a part of a step, but was not told of the whole step: "
            "call loss = loss.for_step(all trajectories of the step) first, and pass loss.normaliser(the same)"
        )
    return loss


def step_normaliser(loss: Any, trajectories: Sequence[Trajectory], normaliser: float | None) -> float:
    """What a step's sum is divided by; checks first that the loss finds every fact it needs.

    Raises:
        DataError: a fact is missing, or nothing is trained.
        ValueError: a normaliser that is not above 0 and finite.
    """
    if hasattr(loss, "check"):
        loss.check(trajectories)
    return check_normaliser(loss.normaliser(trajectories) if normaliser is None else normaliser)


def check_normaliser(normaliser: float) -> float:
    """A normaliser above 0 and finite. Raises ValueError for anything else."""
    value = float(normaliser)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"the normaliser is {value}; a step's loss is divided by it, so it must be above 0 and finite")
    return value


def check_temperature(temperature: float) -> float:
    """A temperature above 0. Raises ValueError for anything else."""
    if temperature > 0 and temperature != float("inf"):
        return float(temperature)
    raise ValueError(f"temperature={temperature!r}: it divides the logits, so it must be above 0 and finite")


LOSS = (
    "a loss is called as loss(logprobs, entropies, trajectory) and returns (sum, metrics): logprobs is a tensor "
    "[L - 1], entropies another or None, trajectory the row with its facts, sum a scalar tensor that is not yet "
    "divided by anything, metrics a dict of numbers; loss.normaliser(trajectories) is what the step's sum is divided by"
)
"""The protocol in one sentence, for messages."""


def check_loss(loss: Any, normaliser: float | None = None) -> None:
    """Raise TypeError, with what to do, for what cannot be called as a loss.

    Args:
        loss: what the user gave.
        normaliser: what the user gave to divide by; a loss must have its own where there is none.
    """
    if isinstance(loss, str):
        raise TypeError(f"loss={loss!r} is a name; pass tt.losses.by_name({loss!r}), or the factory's: tt.losses.sft()")
    if isinstance(loss, Tensor):
        raise TypeError(
            f"loss is a tensor of shape {tuple(loss.shape)}; the engine calls the loss itself, part by part: {LOSS}. "
            "To compute it yourself, take tt.logprobs(model, rows) or engine.score(rows) and call backward"
        )
    name = _name_of(loss)
    if inspect.isclass(loss):
        raise TypeError(f"loss is the class {name}; pass an instance of it, {name}()")
    if not callable(loss):
        raise TypeError(f"loss is {loss!r}, which cannot be called; {LOSS}")
    if inspect.isfunction(loss) and loss.__module__.startswith("treetrain.losses"):
        raise TypeError(f"loss is the function {name} itself, which makes a loss; call it: tt.losses.{name}()")
    _check_arguments(loss, name)
    if getattr(loss, "scope", "trajectory") not in ("trajectory", "batch"):
        raise TypeError(
            f"loss {name} has scope {loss.scope!r}; give 'trajectory', to be called with one row, or 'batch', to be "
            "called once with lists of all rows"
        )
    if normaliser is None and not callable(getattr(loss, "normaliser", None)):
        raise TypeError(
            f"loss {name} has no normaliser(trajectories), the number above 0 that the step's sum is divided by; give "
            "it one (loss.normaliser = lambda trajectories: float(len(trajectories))), or pass normaliser= to "
            "forward_backward"
        )


def check_count(loss: Any, tree: TokenTree) -> None:
    """Raise ValueError where tokens count once and a loss is no sum over tokens."""
    if tree.count == "once" and not getattr(loss, "sums_tokens", False):
        raise ValueError(
            f"the tree counts each node's tokens once (count='once'), but {_name_of(loss)} is no sum over tokens by "
            "themselves, each with its weight, divided by the sum of weights: it means, compares or counts whole rows. "
            "Take a loss that is (sft, reinforce, ppo or distill with reduction='token', dapo, value), or "
            "count='per trajectory'; a loss of your own that is one says sums_tokens = True"
        )


def _name_of(loss: Any) -> str:
    """The name of a function or class, or of the class of any other object."""
    return getattr(loss, "__name__", type(loss).__name__)


def _check_arguments(loss: Any, name: str) -> None:
    """Raise TypeError where Python itself knows that a loss does not take what it is given."""
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):
        return  # written in C: nothing is known before it is called
    values = {"values": None} if getattr(loss, "needs_values", False) else {}
    try:
        signature.bind(None, None, None, **values)
    except TypeError as error:
        keyword = ", and with values=... as it has needs_values" if values else ""
        raise TypeError(
            f"loss {name}{signature} does not take (logprobs, entropies, trajectory){keyword} ({error}); {LOSS}. If "
            f"{name} makes a loss, call it and pass what it returns"
        ) from None


def checked_sum(loss: Any, returned: Any) -> tuple[Any, Any]:
    """What a loss returned, as (sum, metrics).

    Raises:
        TypeError: it is no such pair, its sum is no scalar, or its metrics are no dict of numbers.
    """
    name = _name_of(loss)
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        alone = "; return (sum, {}) where there are no metrics" if isinstance(returned, Tensor | float) else ""
        alone = f"; pass what {name} returns, if it makes a loss" if callable(returned) else alone
        raise TypeError(f"loss {name} returned {_described(returned)}, no pair (sum, metrics){alone}: {LOSS}")
    total, metrics = returned
    if isinstance(total, Tensor):
        if total.dim():
            raise TypeError(
                f"loss {name} returned a sum of shape {tuple(total.shape)}, no scalar; add it up, with the weights "
                "that count: (weights * per_token).sum()"
            )
    elif isinstance(total, bool) or not isinstance(total, int | float):
        raise TypeError(f"loss {name} returned {_described(total)} as its sum, no scalar tensor: {LOSS}")
    elif total:
        raise TypeError(f"loss {name} returned the number {total} as its sum, which has no gradient; return the tensor")
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(
            f"loss {name} returned {_described(metrics)} as its metrics; give a dict of numbers or of pairs (weighted "
            "sum, weight), or {}"
        )
    for key, value in (metrics or {}).items():
        if any(
            isinstance(one, Tensor) and one.numel() != 1 for one in (value if isinstance(value, tuple) else (value,))
        ):
            raise TypeError(f"loss {name} returned the metric {key!r} as {_described(value)}; give its mean, a number")
    return total, metrics


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
