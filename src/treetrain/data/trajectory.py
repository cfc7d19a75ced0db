"""One training row: token ids and per-token training data."""

import abc
import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any, Self, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treetrain.errors import DataError, quoted, shortened

MAX_TOKEN_ID = int(np.iinfo(np.int32).max)
PER_TOKEN_FACTS = (
    "loss_weights",
    "advantages",
    "old_logprobs",
    "ref_logprobs",
    "rollout_logprobs",
    "teacher_logprobs",
    "values",
    "returns",
)
SCALAR_FACTS = ("loss_weights", "advantages")  # one number may stand for all tokens of the row


@dataclasses.dataclass(frozen=True, slots=True, eq=False, init=False)
class Trajectory:
    """A row of L token ids with its training data; checked on construction, then immutable.

    Per-token fields have the length of `ids`: entry t belongs to the prediction of `ids[t]`, entry 0 is unused.

    Args:
        ids: token ids, [L], integers from 0 to 2**31 - 1; with L of 0 or 1 nothing is trained.
        loss_weights: weight of each token's loss, [L] or one number; None trains every token with weight 1.
        advantages: [L] or one number for the whole row.
        old_logprobs: log-probabilities under the policy that sampled the row, [L], in nats.
        ref_logprobs: log-probabilities under the reference policy, [L], in nats.
        rollout_logprobs: log-probabilities recorded by the sampler, [L], in nats. The inference engine's numerics
            may differ from training's, in which `old_logprobs` are.
        teacher_logprobs: log-probabilities under the teacher to distil from, [L], in nats.
        values: value estimates, [L].
        returns: returns, [L].
        reward: one number for the whole row.
        group: rows whose rewards are compared have equal `group` (answers to one prompt, trials of one task).
        pair: rows with equal `pair` form a preference pair.
        chosen: True for the preferred row of its pair, False for the rejected one; without a pair, whether the row is
            desirable.
        id: the row's own name, used in messages.
        key: anything else that enters the forward, e.g. an adapter's name; rows with different keys share no prefix.
        episode: rows with equal `group` and `episode` are calls of one conversation that share its reward;
            None makes the row an episode by itself.
        experts: the experts that each token was routed to during sampling, integers [L, layers, k] (the MoE layers, or
            all layers). They replace the router's choice; -1 for all k of a token and layer keeps it. Equal tokens
            with different experts are not merged.

    Raises:
        DataError: invalid token ids, fields of another length than `ids`, NaN or infinite numbers.
    """

    ids: NDArray[np.int32]
    loss_weights: NDArray[np.float64] | None
    advantages: NDArray[np.float64] | None
    old_logprobs: NDArray[np.float64] | None
    ref_logprobs: NDArray[np.float64] | None
    rollout_logprobs: NDArray[np.float64] | None
    teacher_logprobs: NDArray[np.float64] | None
    values: NDArray[np.float64] | None
    returns: NDArray[np.float64] | None
    reward: float | None
    group: Hashable
    pair: Hashable
    chosen: bool | None
    id: Hashable
    key: Hashable
    episode: Hashable
    experts: NDArray[np.int16] | None

    def __init__(
        self,
        ids: ArrayLike,
        *,
        loss_weights: ArrayLike | None = None,
        advantages: ArrayLike | None = None,
        old_logprobs: ArrayLike | None = None,
        ref_logprobs: ArrayLike | None = None,
        rollout_logprobs: ArrayLike | None = None,
        teacher_logprobs: ArrayLike | None = None,
        values: ArrayLike | None = None,
        returns: ArrayLike | None = None,
        reward: float | None = None,
        group: Hashable = None,
        pair: Hashable = None,
        chosen: bool | None = None,
        id: Hashable = None,
        key: Hashable = None,
        episode: Hashable = None,
        experts: ArrayLike | None = None,
    ) -> None:
        row = "trajectory" if id is None else f"trajectory {quoted(id)}"
        token_ids = _token_ids(ids, row)
        facts: dict[str, Any] = {
            "loss_weights": loss_weights,
            "advantages": advantages,
            "old_logprobs": old_logprobs,
            "ref_logprobs": ref_logprobs,
            "rollout_logprobs": rollout_logprobs,
            "teacher_logprobs": teacher_logprobs,
            "values": values,
            "returns": returns,
        }
        for name, value in facts.items():
            facts[name] = None if value is None else _per_token(value, name, token_ids.size, row)
        names: dict[str, Any] = {"group": group, "pair": pair, "id": id, "key": key, "episode": episode}
        for name, value in names.items():
            _check_hashable(value, name, row)
        facts |= {"ids": token_ids, "reward": _reward(reward, row), "chosen": _chosen(chosen, row)} | names
        facts["experts"] = None if experts is None else _experts(experts, token_ids.size, row)
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return self.ids.size

    @property
    def weights(self) -> NDArray[np.float64]:
        """Loss weights as the losses use them: float64 [L], ones if none were given, entry 0 always 0."""
        weights = np.ones(self.ids.size) if self.loss_weights is None else self.loss_weights.copy()
        weights[:1] = 0.0
        return weights

    def replace(self, **changes: Any) -> Self:
        """A copy with the named fields changed; all fields are checked again."""
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        given = [f"{len(self)} tokens"]
        given += [name for name in PER_TOKEN_FACTS if getattr(self, name) is not None]
        given += ["experts"] if self.experts is not None else []
        scalars = ("reward", "group", "pair", "chosen", "id", "key", "episode")
        given += [f"{name}={getattr(self, name)!r}" for name in scalars if getattr(self, name) is not None]
        return f"Trajectory({', '.join(given)})"


class LazyTrajectories(Sequence[Trajectory]):
    """Rows that are created on access and not kept. A subclass implements `__len__` and `row`."""

    @abc.abstractmethod
    def row(self, number: int) -> Trajectory:
        """Row 0 to K - 1."""

    @overload
    def __getitem__(self, number: int) -> Trajectory: ...
    @overload
    def __getitem__(self, number: slice) -> list[Trajectory]: ...
    def __getitem__(self, number: int | slice) -> Trajectory | list[Trajectory]:
        if isinstance(number, slice):
            return [self.row(place) for place in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        return self.row(number % len(self))


def common_prefix(one: NDArray[Any], other: NDArray[Any]) -> int:
    """Number of leading entries that two arrays share."""
    length = min(one.size, other.size)
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length


def _token_ids(ids: ArrayLike, row: str) -> NDArray[np.int32]:
    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise DataError(
            f"{row}: ids are no flat list ({shortened(error)}); give one list of numbers per row"
        ) from error
    if array.ndim != 1:
        raise DataError(f"{row}: ids have shape {array.shape}, expected [L]; give one trajectory per row")
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.dtype.kind not in "iu":
        raise DataError(f"{row}: ids are of type {array.dtype}, expected whole numbers")
    for bad, what in ((array < 0, "negative"), (array > MAX_TOKEN_ID, f"above {MAX_TOKEN_ID}")):
        if bad.any():
            at = int(bad.argmax())
            raise DataError(f"{row}: ids[{at}] = {array[at]} is {what}; token ids are 0 to {MAX_TOKEN_ID}")
    return np.array(array, np.int32, order="C")


def _per_token(value: ArrayLike, name: str, length: int, row: str) -> NDArray[np.float64]:
    try:
        # Always a copy: the caller may reuse its buffer.
        array = np.array(value, dtype=np.float64, order="C")
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{row}: {name} are not numbers ({shortened(error)})") from error
    if array.ndim == 0 and name in SCALAR_FACTS:
        array = np.full(length, float(array))
        if not np.isfinite(np.float64(value)):  # type: ignore[arg-type]
            raise DataError(f"{row}: {name} = {value} is not finite")
    if array.shape != (length,):
        given = f"{array.size} entries" if array.ndim == 1 else f"shape {array.shape}"
        hint = "; entry 0, which is unused, is counted too" if array.shape == (length - 1,) else ""
        raise DataError(f"{row}: {name} have {given}, ids have {length}; give one entry per token{hint}")
    finite = np.isfinite(array)
    if not finite.all():
        at = int(finite.argmin())
        raise DataError(f"{row}: {name}[{at}] = {array[at]} is not finite; use 0 where there is no value")
    return array


def _experts(experts: ArrayLike, length: int, row: str) -> NDArray[np.int16]:
    try:
        array = np.asarray(experts)
    except ValueError as error:
        raise DataError(f"{row}: experts are no [L, layers, k] block of numbers ({shortened(error)})") from error
    if array.ndim != 3 or len(array) != length:
        hint = "; give -1 for a token whose experts were not recorded" if len(array) == length - 1 else ""
        raise DataError(f"{row}: experts have shape {array.shape}, expected [{length}, layers, k]{hint}")
    if array.size and array.dtype.kind not in "iu":
        raise DataError(f"{row}: experts are of type {array.dtype}, expected whole numbers")
    most = int(np.iinfo(np.int16).max)
    if array.size and not -1 <= array.min() <= array.max() <= most:
        bad = array.min() if array.min() < -1 else array.max()
        raise DataError(f"{row}: experts hold {bad}; they are numbered 0 to {most}, and -1 where none was recorded")
    ordered = np.sort(array, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    wrong = (twice.any(-1) | ((array < 0).any(-1) & (array >= 0).any(-1))) if array.size else np.zeros((0, 0), bool)
    if wrong.any():
        token, layer = np.argwhere(wrong)[0].tolist()
        raise DataError(
            f"{row}: experts[{token}][{layer}] = {array[token, layer].tolist()}; the experts of a token differ, and -1 "
            "stands for all of them or none"
        )
    return np.array(array, np.int16, order="C")


def _reward(reward: float | None, row: str) -> float | None:
    if reward is None:
        return None
    try:
        value = math.nan if isinstance(reward, str) else float(reward)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{row}: reward is {quoted(reward)}, expected one finite number")
    return value


def _chosen(chosen: bool | None, row: str) -> bool | None:
    if chosen is None or isinstance(chosen, bool | np.bool_):
        return None if chosen is None else bool(chosen)
    raise DataError(f"{row}: chosen is {quoted(chosen)}, expected True, False or None")


def _check_hashable(value: object, name: str, row: str) -> None:
    try:
        hash(value)
    except TypeError as error:
        raise DataError(f"{row}: {name} is a {type(value).__name__}; give a string, number or tuple") from error
