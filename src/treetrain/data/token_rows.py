"""Rows of token ids, as RL loggers and tokenised SFT sets write them, to trajectories."""

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treetrain.data.notes import Notes
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError

IGNORED_LABEL = -100  # the Hugging Face and PyTorch mark for "not trained"
GROUP_KEYS = ("group_id", "group", "task_id")
EPISODE_KEYS = ("episode_id", "episode")
# field of Trajectory -> the names it goes by in files; two of them in one row is an error
FACT_KEYS = {
    "old_logprobs": ("old_logprobs", "logprobs"),
    "ref_logprobs": ("ref_logprobs",),
    "rollout_logprobs": ("rollout_logprobs", "sampling_logprobs"),
    "teacher_logprobs": ("teacher_logprobs",),
    "advantages": ("advantages", "advantage"),
    "values": ("values",),
    "returns": ("returns",),
}
WEIGHT_KEYS = ("labels", "loss_mask", "loss_weights")
EXPERT_KEYS = ("experts", "routed_experts")
ROW_KEYS = {"input_ids", "attention_mask", "reward", "id", "pair", "chosen", "key"}.union(
    WEIGHT_KEYS, EXPERT_KEYS, GROUP_KEYS, EPISODE_KEYS, *FACT_KEYS.values()
)


def trajectory_from_token_row(row: Mapping[str, Any], place: str, notes: Notes | None = None) -> Trajectory:
    """Read one token row.

    Args:
        row: `input_ids` [L]; what is trained by `labels` (unshifted: equal to `input_ids`, or -100),
            `loss_mask` (0/1) or `loss_weights`, multiplied where several are given, else all; optional
            `attention_mask` (padding on either side is cut off); `logprobs`/`old_logprobs`, `ref_logprobs`,
            `rollout_logprobs`/`sampling_logprobs`, `teacher_logprobs`, `values`, `returns` [L]; `advantage(s)` [L]
            or one number; `experts`/`routed_experts` [L, layers, k], or [L - 1, layers, k] without those of the last
            token; `reward`, `group_id`/`group`/`task_id`, `episode`, `pair`, `chosen`, `id`.
            `null` is allowed in a per-token list where the token is not trained.
        place: where the row is, for messages.
        notes: collects what was ignored.

    Raises:
        DataError: naming `place`, the key, both values and what to do.
    """
    notes = notes or Notes()
    for name in (name for name in row if name not in ROW_KEYS):
        notes.add(f"key {name!r} is not used", place)
    try:
        return _read(row, place, notes)
    except DataError as error:
        raise DataError(f"{place}: {error}") from error


def _read(row: Mapping[str, Any], place: str, notes: Notes) -> Trajectory:
    if row.get("input_ids") is None:
        raise DataError(f"no `input_ids` in the row; it has {', '.join(map(repr, row)) or 'no keys'}")
    whole = Trajectory(row["input_ids"])
    keep = _unpadded(row.get("attention_mask"), len(whole))
    ids = whole.ids[keep]
    if all(row.get(name) is None for name in WEIGHT_KEYS):
        notes.add("no labels, loss_mask or loss_weights: every token is trained", place)
    weights = _weights(row, whole, keep)
    facts = {field: _fact(row, names, len(whole), keep, weights) for field, names in FACT_KEYS.items()}
    return Trajectory(
        ids,
        loss_weights=weights,
        **facts,
        reward=row.get("reward"),
        group=first_of(row, GROUP_KEYS),
        episode=first_of(row, EPISODE_KEYS),
        pair=row.get("pair"),
        chosen=row.get("chosen"),
        key=row.get("key"),
        experts=_experts(first_of(row, EXPERT_KEYS), len(whole), keep),
        id=place if row.get("id") is None else row["id"],
    )


def first_of(row: Mapping[str, Any], names: tuple[str, ...]) -> Hashable:
    """The value of the first of these keys that is there and not null."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def _unpadded(mask: Any, length: int) -> slice:
    if mask is None:
        return slice(0, length)
    entries = _numbers(mask, "attention_mask", length)
    if not np.isin(entries, (0, 1)).all():
        raise DataError("attention_mask has entries other than 0 and 1; give 1 for tokens and 0 for padding")
    real = np.flatnonzero(entries)
    if real.size == 0:
        return slice(0, 0)
    first, last = int(real[0]), int(real[-1])
    if real.size != last + 1 - first:
        hole = first + int(np.argmin(entries[first : last + 1]))
        raise DataError(
            f"attention_mask is 0 at {hole}, between tokens {first} and {last}; padding can be left or "
            "right, not inside: write the row without those tokens"
        )
    return slice(first, last + 1)


def _not_negative(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    if weights.size and weights.min() < 0:
        at = int(weights.argmin())
        raise DataError(
            f"loss_weights[{at}] = {weights[at]:g}, but weights are 0 or more; put signs into advantages and use the "
            "reinforce loss"
        )
    return weights


def _weights(row: Mapping[str, Any], whole: Trajectory, keep: slice) -> NDArray[np.float64] | None:
    length = len(whole)
    given = []
    if row.get("labels") is not None:
        labels = _numbers(row["labels"], "labels", length)[keep]
        given.append(_trained_by_labels(labels, whole.ids[keep]))
    if row.get("loss_mask") is not None:
        mask = _numbers(row["loss_mask"], "loss_mask", length)[keep]
        if not np.isin(mask, (0, 1)).all():
            odd = mask[~np.isin(mask, (0, 1))][0]
            raise DataError(f"loss_mask has the entry {odd}, expected 0 or 1; use loss_weights for other weights")
        given.append(mask)
    if row.get("loss_weights") is not None:
        weights = row["loss_weights"]
        if not isinstance(weights, list):
            raise DataError(f"loss_weights is {weights!r}, expected a list with one number per token")
        given.append(_not_negative(_numbers(weights, "loss_weights", length)[keep]))
    return np.prod(given, axis=0, dtype=np.float64) if given else None


def _trained_by_labels(labels: NDArray[np.float64], ids: NDArray[np.int32]) -> NDArray[np.float64]:
    trained = labels != IGNORED_LABEL
    wrong = trained & (labels != ids)
    if wrong.any():
        at = int(wrong.argmax())
        shifted = ids.size > 1 and bool((labels[:-1] == ids[1:])[trained[:-1]].all())
        cure = (
            "they are shifted by one; give them unshifted" if shifted else "the prediction of another token is no SFT"
        )
        raise DataError(
            f"labels[{at}] = {labels[at]:g} but input_ids[{at}] = {ids[at]}; labels must equal input_ids "
            f"or be {IGNORED_LABEL} ({cure})"
        )
    return trained.astype(np.float64)


def _fact(
    row: Mapping[str, Any],
    names: tuple[str, ...],
    length: int,
    keep: slice,
    weights: NDArray[np.float64] | None,
) -> NDArray[np.float64] | float | None:
    given = [name for name in names if row.get(name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise DataError(f"both {given[0]!r} and {given[1]!r} are there; they mean the same: keep one")
    name = given[0]
    value = row[name]
    if names == FACT_KEYS["advantages"] and not isinstance(value, list):
        return value  # one number for the whole row; the trajectory checks it
    entries = _numbers(value, name, length, nulls=True)[keep]
    if np.isnan(entries).any():
        _null_to_zero(entries, value[keep], name, weights)
    return entries


def _null_to_zero(entries: NDArray[np.float64], raw: list[Any], name: str, weights: NDArray[np.float64] | None) -> None:
    for at in np.flatnonzero(np.isnan(entries)):
        unused = at == 0 or (weights is not None and weights[at] == 0)
        if raw[at] is not None:
            raise DataError(f"{name}[{at}] is NaN; give a finite number")
        if not unused:
            raise DataError(f"{name}[{at}] is null but the token is trained; give a number, or do not train it")
        entries[at] = 0.0


def _experts(value: Any, length: int, keep: slice) -> NDArray[Any] | None:
    """Recorded experts [L, layers, k]; samplers do not run the last token of a row, so it may be left out."""
    if value is None:
        return None
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"experts are no [L, layers, k] block of numbers ({error})") from error
    if array.ndim == 3 and len(array) == length - 1 and len(array):
        array = np.concatenate([array, np.full_like(array[:1], -1)])
    if array.ndim != 3 or len(array) != length:
        raise DataError(f"experts have shape {array.shape}, expected [{length}, layers, k] for {length} input_ids")
    return array[keep]


def _numbers(value: Any, name: str, length: int, *, nulls: bool = False) -> NDArray[np.float64]:
    if not isinstance(value, list | tuple | np.ndarray):
        raise DataError(f"{name} is {value!r}, expected a list with one number per token")
    if len(value) != length:
        hint = "; entry 0, which predicts nothing, is counted too" if len(value) == length - 1 else ""
        raise DataError(f"{name} has {len(value)} entries, input_ids has {length}; give one per token{hint}")
    try:
        array = np.array(value, np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} is no flat list of numbers ({error})") from error
    if array.ndim != 1:
        raise DataError(f"{name} has shape {array.shape}, expected a flat list of {length} numbers")
    if not nulls and not np.isfinite(array).all():
        at = int(np.isfinite(array).argmin())
        raise DataError(f"{name}[{at}] is {value[at]!r}; give a finite number")
    return array
