"""One training row: token ids and per-token training data."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
from jaxtyping import Float64, Int32, Int64, Shaped
from numpy.typing import ArrayLike

from treetrain.core.errors import DataError, quoted, shortened
from treetrain.core.tree.token_ids import MOST_LOGPROB, IdSets, checked_ids

PerToken = Float64[np.ndarray, " L"]
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
GIVEN = PER_TOKEN_FACTS[1:]
"""Those that a row may lack: a row without loss weights trains every token with weight 1."""
SCALAR_FACTS = ("loss_weights", "advantages")  # one number may stand for all tokens of the row


class Numbered(NamedTuple):
    """Rows whose special tokens have numbers of their own; see `SpecialTokens`."""

    flat: Int32[np.ndarray, " flat"]
    """The rows concatenated."""
    restore: Callable[[Int32[np.ndarray, " N"]], tuple[Int32[np.ndarray, " N"], object]]
    """Maps the numbers of a tree's N tokens to their ids, and to what the tree keeps in `TokenTree.special`."""


class SpecialTokens(Protocol):
    """Something that rows may carry, such as images, by which tokens of equal ids differ.

    Rows are merged by numbers: two tokens get the same number only if their ids and what they carry are equal.
    """

    name: str
    """Of the field of a row, and in `TokenTree.special`."""

    def number(
        self,
        rows: "Sequence[Trajectory | None]",
        flat: Int32[np.ndarray, " flat"],
        lengths: Int64[np.ndarray, " K"],
    ) -> Numbered | None:
        """Put numbers in the place of ids; None if no row carries anything.

        Args:
            rows: None for a row given as ids only.
            flat: the rows' ids concatenated, or numbers by which another field has replaced them.

        Raises:
            DataError: rows that do not fit together.
        """


@dataclasses.dataclass(frozen=True, slots=True, eq=False, init=False)
class Trajectory:
    """A row of L token ids with its training data; checked on construction, then immutable.

    This is the row of a dense model for text. `treetrain.Trajectory`, which users make, says what every field holds and
    adds images and recorded experts.

    Raises:
        DataError: see `treetrain.Trajectory`.
    """

    special: ClassVar[tuple[SpecialTokens, ...]] = ()
    """What rows of this class may carry besides, in the order in which it is numbered."""

    ids: Int32[np.ndarray, " L"]
    loss_weights: PerToken | None
    advantages: PerToken | None
    old_logprobs: PerToken | None
    ref_logprobs: PerToken | None
    rollout_logprobs: PerToken | None
    teacher_logprobs: PerToken | None
    values: PerToken | None
    returns: PerToken | None
    reward: float | None
    group: Hashable
    pair: Hashable
    chosen: bool | None
    id: Hashable
    key: Hashable
    episode: Hashable
    sampling_mask: IdSets | None
    teacher_topk: IdSets | None

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
        sampling_mask: object = None,
        teacher_topk: object = None,
    ) -> None:
        facts: dict[str, object] = {
            "loss_weights": loss_weights,
            "advantages": advantages,
            "old_logprobs": old_logprobs,
            "ref_logprobs": ref_logprobs,
            "rollout_logprobs": rollout_logprobs,
            "teacher_logprobs": teacher_logprobs,
            "values": values,
            "returns": returns,
        }
        names: dict[str, object] = {"group": group, "pair": pair, "id": id, "key": key, "episode": episode}
        try:
            token_ids = checked_ids(ids)
            for name, value in facts.items():
                if value is None:
                    continue
                if name in SCALAR_FACTS and (np.isscalar(value) or getattr(value, "ndim", 1) == 0):
                    per_token([value], name, 1)
                    value = np.full(token_ids.size, value)
                facts[name] = made = per_token(value, name, token_ids.size)
                _check_logprobs(name, made, facts["loss_weights"], token_ids)
            for name, value in names.items():
                try:
                    hash(value)
                except TypeError as error:
                    raise DataError(f"{name} is a {type(value).__name__}; give a string, number or tuple") from error
            facts.update(names, ids=token_ids)
            facts["reward"] = None if reward is None else _reward(reward)
            facts["chosen"] = None if chosen is None else _chosen(chosen)
            for name, sets, recorded in (("sampling_mask", sampling_mask, False), ("teacher_topk", teacher_topk, True)):
                facts[name] = read = None if sets is None else IdSets.of(sets, name, token_ids.size)
                if read is not None and recorded != (read.logprobs is not None):
                    instead = "a pair: ids, and as many log-probabilities" if recorded else "ids alone"
                    raise DataError(f"{name} has {'no ' * recorded}log-probabilities; give {instead}")
            if isinstance(kept := facts["sampling_mask"], IdSets):
                facts["sampling_mask"] = kept.beginning_with(token_ids, "sampling_mask")
        except DataError as error:
            raise of_row(id, error) from error
        for name, value in facts.items():
            object.__setattr__(self, name, value)  # the class is frozen

    def __len__(self) -> int:
        return self.ids.size

    @property
    def weights(self) -> PerToken:
        """Loss weights as the losses use them: ones if none were given, entry 0 always 0."""
        weights = np.ones(self.ids.size) if self.loss_weights is None else self.loss_weights.copy()
        weights[:1] = 0.0  # nothing predicts the first token
        return weights

    def for_losses(self) -> "Trajectory":
        """The row as losses read it, for other processes: without large fields that only a forward reads."""
        return self

    def _specials(self) -> list[str]:
        """The fields of `special` that the row has, in words."""
        return []

    def replace(self, **changes: object) -> Self:
        """A copy with the named fields changed; all fields are checked again."""
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        given = [f"{len(self)} tokens"]
        given += [name for name in PER_TOKEN_FACTS if getattr(self, name) is not None]
        given += [name for name in ("sampling_mask", "teacher_topk") if getattr(self, name) is not None]
        given += self._specials()
        scalars = ("reward", "group", "pair", "chosen", "id", "key", "episode")
        given += [f"{name}={getattr(self, name)!r}" for name in scalars if getattr(self, name) is not None]
        return f"Trajectory({', '.join(given)})"


def of_row(id: Hashable, error: DataError) -> DataError:
    """The error with the name of its row before it."""
    return DataError(f"trajectory{'' if id is None else f' {quoted(id)}'}: {error}")


def common_prefix(one: Shaped[np.ndarray, " A"], other: Shaped[np.ndarray, " B"]) -> int:
    """Number of leading entries that two arrays share."""
    length = min(one.size, other.size)
    if length == 0:
        return 0
    different = one[:length] != other[:length]
    first = int(different.argmax())
    return first if different[first] else length


def per_token(value: object, name: str, length: int, *, nulls: bool = False) -> PerToken:
    """Convert to a finite number for each of `length` tokens. With `nulls`, NaN and None become NaN.

    Raises:
        DataError: the message begins with the name.
    """
    try:
        # Always a copy: the caller may reuse its buffer.
        array = np.array(value, np.float64, order="C")
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise DataError(f"{name} is no flat list of numbers ({shortened(error)})") from error
    if array.shape != (length,):
        given = f"is {quoted(value)}" if array.ndim == 0 else f"has shape {array.shape}"
        given = f"has {array.size} entries" if array.ndim == 1 else given
        hint = "; entry 0, which predicts nothing, is counted too" if array.shape == (length - 1,) else ""
        raise DataError(f"{name} {given}, but there are {length} token ids; give one number per token{hint}")
    finite = np.isfinite(array) | (nulls & np.isnan(array))
    if not finite.all():
        at = int(finite.argmin())
        raise DataError(f"{name}[{at}] is {array[at]:g}; give a finite number")
    return array


def _check_logprobs(name: str, values: PerToken, weights: Any, ids: Int32[np.ndarray, " L"]) -> None:
    """Raise DataError for a trained token's probability above 1; for other tokens any number may stand for none."""
    above = (values > MOST_LOGPROB)[1:] & (True if weights is None else weights[1:] != 0)
    if name.endswith("logprobs") and above.any():
        at = 1 + int(above.argmax())
        raise DataError(
            f"{name}[{at}] of token {ids[at]} is {values[at]:g}, above 0; give log-probabilities in nats, at most "
            f"0 (to {MOST_LOGPROB:g}, for rounding), or a loss weight of 0"
        )


def _reward(reward: float) -> float:
    try:
        value = math.nan if isinstance(reward, str) else float(reward)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"reward is {quoted(reward)}, expected one finite number")
    return value


def _chosen(chosen: bool) -> bool:
    if isinstance(chosen, bool | np.bool_):
        return bool(chosen)
    raise DataError(f"chosen is {quoted(chosen)}, expected True, False or None")
