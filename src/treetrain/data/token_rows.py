"""Read rows of token ids, as RL loggers and tokenised SFT sets write them, into trajectories."""

from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treetrain.data.records import Notes, Record
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError, quoted, shortened

IGNORED_LABEL = -100  # the Hugging Face and PyTorch mark for "not trained"
GROUP_KEYS = ("group_id", "group", "task_id")
EPISODE_KEYS = ("episode_id", "episode")
# field of Trajectory -> its names in files; a row with two of them is an error
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
ROW_KEYS = ("reward", "id", "pair", "chosen", "key", *GROUP_KEYS, *EPISODE_KEYS)
"""Facts of a whole row, in token rows and conversations."""
TOKEN_KEYS = frozenset(("input_ids", "attention_mask", *ROW_KEYS, *WEIGHT_KEYS, *EXPERT_KEYS)).union(
    *FACT_KEYS.values()
)


def trajectory_from_token_row(row: Record, notes: Notes) -> Trajectory:
    """Read one token row.

    Args:
        row: `input_ids` [L] and optional keys. `labels` (unshifted: equal to `input_ids`, or -100), `loss_mask` (0/1)
            and `loss_weights` say which tokens are trained; several are multiplied, and without any all tokens are
            trained. `attention_mask`: padding on either side is cut off. Per token [L]: `logprobs`/`old_logprobs`,
            `ref_logprobs`, `rollout_logprobs`/`sampling_logprobs`, `teacher_logprobs`, `values`, `returns`;
            `advantage(s)` may be one number. `experts`/`routed_experts`: [L, layers, k], or [L - 1, layers, k] without
            the last token. Per row: `reward`, `group_id`/`group`/`task_id`, `episode_id`/`episode`, `pair`, `chosen`,
            `key`, `id`. A per-token list may hold `null` at tokens that are not trained.
        notes: receives remarks on what was ignored.

    Raises:
        DataError: a bad value; the message names the key, both values and what to do.
    """
    notes.unused_keys(row, TOKEN_KEYS)
    if row.get("input_ids") is None:
        raise DataError(f"no `input_ids` in the row; it has {', '.join(map(quoted, list(row)[:20])) or 'no keys'}")
    whole = Trajectory(row["input_ids"])
    keep = _unpadded(row.get("attention_mask"), len(whole))
    ids = whole.ids[keep]
    weights = _weights(row, ids, keep, len(whole))
    if weights is None:
        notes.add("no labels, loss_mask or loss_weights: every token is trained")
    facts = {field: _fact(row, names, len(whole), keep, weights) for field, names in FACT_KEYS.items()}
    return Trajectory(
        ids,
        loss_weights=weights,
        **facts,
        **row_facts(row, notes),
        experts=_experts(first_of(row, EXPERT_KEYS), len(whole), keep),
    )


def row_facts(row: Record, notes: Notes) -> dict[str, Any]:
    """Facts of the whole row as arguments of `Trajectory`; a row without an id is named by its place."""
    facts = {name: row.get(name) for name in ("reward", "pair", "chosen", "key")}
    facts["id"] = notes.place if row.get("id") is None else row["id"]
    return facts | {"group": first_of(row, GROUP_KEYS), "episode": first_of(row, EPISODE_KEYS)}


def first_of(row: Record, names: tuple[str, ...]) -> Hashable:
    """The value of the first of these keys that is present and not null."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def _unpadded(mask: Any, length: int) -> slice:
    """The slice of tokens that are not padding."""
    if mask is None:
        return slice(0, length)
    entries = _zeros_and_ones(mask, "attention_mask", length, "give 1 for tokens and 0 for padding")
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


def _weights(row: Record, ids: NDArray[np.int32], keep: slice, length: int) -> NDArray[np.float64] | None:
    """The product of labels, mask and weights given in the row; None if there are none."""
    given = []
    if row.get("labels") is not None:
        labels = _numbers(row["labels"], "labels", length)[keep]
        wrong = (labels != IGNORED_LABEL) & (labels != ids)
        if wrong.any():
            at, trained = int(wrong.argmax()), labels[:-1] != IGNORED_LABEL
            shifted = ids.size > 1 and (labels[:-1] == ids[1:])[trained].all()
            cure = "they are shifted by one; give them unshifted" if shifted else "another token's prediction is no SFT"
            raise DataError(
                f"labels[{at}] = {labels[at]:g} but input_ids[{at}] = {ids[at]}; labels must equal input_ids "
                f"or be {IGNORED_LABEL} ({cure})"
            )
        given.append(labels != IGNORED_LABEL)
    if row.get("loss_mask") is not None:
        given.append(_zeros_and_ones(row["loss_mask"], "loss_mask", length, "use loss_weights for other weights")[keep])
    if row.get("loss_weights") is not None:
        weights = _numbers(row["loss_weights"], "loss_weights", length)[keep]
        if weights.min(initial=0) < 0:
            at = int(weights.argmin())
            raise DataError(
                f"loss_weights[{at}] = {weights[at]:g}, but weights are 0 or more; put signs into advantages and use "
                "the reinforce loss"
            )
        given.append(weights)
    return np.prod(given, axis=0, dtype=np.float64) if given else None


def _fact(
    row: Record, names: tuple[str, ...], length: int, keep: slice, weights: NDArray[np.float64] | None
) -> NDArray[np.float64] | float | None:
    given = [name for name in names if row.get(name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise DataError(f"both {given[0]!r} and {given[1]!r} are there; they mean the same: keep one")
    name, value = given[0], row[given[0]]
    if names == FACT_KEYS["advantages"] and not isinstance(value, list):
        return value  # one number for the whole row; the trajectory checks it
    entries, raw = _numbers(value, name, length, nulls=True)[keep], value[keep]
    for at in np.flatnonzero(np.isnan(entries)):
        if raw[at] is not None:
            raise DataError(f"{name}[{at}] is NaN; give a finite number")
        if at > 0 and (weights is None or weights[at] != 0):
            raise DataError(f"{name}[{at}] is null but the token is trained; give a number, or do not train it")
        entries[at] = 0.0
    return entries


def _experts(value: Any, length: int, keep: slice) -> NDArray[Any] | None:
    """Recorded experts [L, layers, k]; the last token may be missing, since samplers do not run it."""
    if value is None:
        return None
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"experts are no [L, layers, k] block of numbers ({shortened(error)})") from error
    if array.ndim == 3 and len(array) == length - 1 and len(array):
        array = np.concatenate([array, np.full_like(array[:1], -1)])
    if array.ndim != 3 or len(array) != length:
        raise DataError(f"experts have shape {array.shape}, expected [{length}, layers, k] for {length} input_ids")
    return array[keep]


def _zeros_and_ones(value: Any, name: str, length: int, cure: str) -> NDArray[np.float64]:
    entries = _numbers(value, name, length)
    odd = (entries != 0) & (entries != 1)
    if odd.any():
        raise DataError(f"{name}[{int(odd.argmax())}] is {entries[odd][0]:g}, expected 0 or 1; {cure}")
    return entries


def _numbers(value: Any, name: str, length: int, *, nulls: bool = False) -> NDArray[np.float64]:
    if not isinstance(value, list | tuple | np.ndarray):
        raise DataError(f"{name} is {quoted(value)}, expected a list with one number per token")
    if len(value) != length:
        hint = "; entry 0, which predicts nothing, is counted too" if len(value) == length - 1 else ""
        raise DataError(f"{name} has {len(value)} entries, input_ids has {length}; give one per token{hint}")
    try:
        array = np.array(value, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{name} is no flat list of numbers ({shortened(error)})") from error
    if array.ndim != 1:
        raise DataError(f"{name} has shape {array.shape}, expected a flat list of {length} numbers")
    finite = np.isfinite(array) | (nulls & np.isnan(array))
    if not finite.all():
        at = int(finite.argmin())
        raise DataError(f"{name}[{at}] is {quoted(value[at])}; give a finite number")
    return array
