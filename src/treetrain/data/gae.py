"""Advantages and returns of single tokens from rewards and a critic's values."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treetrain.errors import DataError


class Advantages(NamedTuple):
    """Per-token facts of a row, [L] float64; entry 0 is 0 and unused, as in a `Trajectory`."""

    advantages: NDArray[np.float64]
    returns: NDArray[np.float64]
    """Advantage plus value: what the critic should have said."""


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    gamma: float = 1.0,
    lam: float = 0.95,
    *,
    actions: ArrayLike | None = None,
    last_value: float = 0.0,
) -> Advantages:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) over the tokens of one row.

    A_t = d_t + gamma * lam * A_next, d_t = r_t + gamma * V_next - V_t, over the tokens that are actions. "next" is the
    next action, so text of users and tools costs no time: it is discounted by neither gamma nor lam. A reward on such
    text is given to the last action before it.

    Args:
        rewards: [L], entry t for the token t; or one number, which the last action gets.
        values: [L], entry t the value of the state before token t (entry 0 is unused, as in `Trajectory.values`). Of
            `treetrain.values`, which count by the token just read, this is entry t - 1.
        gamma: discount of a step, 0 to 1.
        lam: how far advantages look past the critic, 0 (one step) to 1 (the whole row).
        actions: [L], non-zero where the policy chose the token, such as `loss_weights`; None for all but the first.
        last_value: of the state after the last token: 0 where the episode ended, the critic's where it was cut off.

    Returns:
        advantages and returns, 0 where the token is no action.

    Raises:
        DataError: lengths that differ, a number that is not finite, or a reward that no action has earned.
        ValueError: gamma or lam outside 0 to 1.
    """
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name} is {number!r}; allowed are numbers from 0 to 1")
    value = _numbers("values", values)
    length = len(value)
    chosen = np.ones(length, bool) if actions is None else _numbers("actions", actions, length) != 0
    chosen[:1] = False
    steps = np.flatnonzero(chosen)
    reward = np.asarray(rewards, np.float64)
    if reward.ndim == 0:
        spread = np.zeros(length)
        spread[steps[-1:]] = reward
        reward = spread
    earned = _earned(_numbers("rewards", reward, length), steps)
    following = np.append(value[steps][1:], last_value)
    errors = earned + gamma * following - value[steps]
    found, advantage = np.zeros(len(steps)), 0.0
    for step in range(len(steps) - 1, -1, -1):
        advantage = errors[step] + gamma * lam * advantage
        found[step] = advantage
    advantages, returns = np.zeros(length), np.zeros(length)
    advantages[steps], returns[steps] = found, found + value[steps]
    return Advantages(advantages, returns)


def _earned(rewards: NDArray[np.float64], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """[S]: what each action earned until the next one."""
    before = rewards[1 : steps[0]] if len(steps) else rewards[1:]
    if before.any():
        at = 1 + int(np.flatnonzero(before)[0])
        raise DataError(
            f"rewards[{at}] = {rewards[at]:g} comes before any action; give it to an action, or leave it out"
        )
    return np.add.reduceat(rewards, steps) if len(steps) else np.zeros(0)


def _numbers(name: str, given: ArrayLike, length: int | None = None) -> NDArray[np.float64]:
    array = np.asarray(given, np.float64)
    if array.ndim != 1 or (length is not None and len(array) != length):
        wanted = "[L]" if length is None else f"[{length}], as the values have"
        raise DataError(f"{name} have shape {array.shape}; give {wanted}")
    # Entry 0 is unused whatever it holds.
    if not np.isfinite(array[1:]).all():
        at = 1 + int(np.flatnonzero(~np.isfinite(array[1:]))[0])
        raise DataError(f"{name}[{at}] = {array[at]}; give finite numbers")
    return array
