"""One training row: token ids and per-token training data."""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Self

import numpy as np
from jaxtyping import Float64, Int16, Int32, Shaped
from numpy.typing import ArrayLike

from treetrain.core.errors import DataError, quoted, shortened
from treetrain.core.tree.images import Image, checked_images
from treetrain.core.tree.token_ids import IdSets, checked_ids

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
        rollout_logprobs: log-probabilities recorded by the sampler, [L], in nats. They have the inference engine's
            numerics; `old_logprobs` have the trainer's.
        teacher_logprobs: log-probabilities under the teacher to distil from, [L], in nats.
        values: value estimates, [L].
        returns: returns, [L].
        reward: one number for the whole row.
        group: rows whose rewards are compared have equal `group` (answers to one prompt, trials of one task).
        pair: rows with equal `pair` form a preference pair.
        chosen: True for the preferred row of its pair, False for the rejected one; without a pair, whether the row is
            desirable.
        id: the row's own name, used in messages.
        key: anything else that changes the forward, e.g. an adapter's name; rows with different keys share no prefix.
        episode: rows with equal `group` and `episode` are calls of one conversation that share its reward;
            None makes the row an episode by itself.
        experts: the experts that each token was routed to during sampling, integers [L, layers, k] (the MoE layers, or
            all layers). They replace the router's choice, unless all k of a token and layer are -1. Equal tokens
            with different experts are not merged.
        sampling_mask: the ids that the sampler kept (top-p, top-k) for each token, the token's own among them: L lists,
            None where there is none, or an array [L, k] filled up with -1. Log-probabilities and entropies of such a
            token are those of the distribution over these ids.
        teacher_topk: a pair: ids for each token, such as the k that a teacher finds most likely, in the form of
            `sampling_mask`, and their log-probabilities under the teacher, in nats, in the same form.
        images: the row's images as a processor makes them, such as ``{"pixel_values": ..., "image_grid_thw": ...}``.
            Their tokens, and those after them, are merged only with those of equal images.
        image_token: the token id that stands for images in `ids` (``model.config.image_token_id``): one run of it for
            each image, or of several tiles, or divided into lines, as the model's processor makes them.

    Raises:
        DataError: invalid token ids, fields of another length than `ids`, NaN or infinite numbers, an empty set, a
            sampling mask without the token itself, log-probabilities of a teacher above 0.
    """

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
    experts: Int16[np.ndarray, "L layers k"] | None
    sampling_mask: IdSets | None
    teacher_topk: IdSets | None
    images: tuple[Image, ...]
    image_token: int | None

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
        sampling_mask: object = None,
        teacher_topk: object = None,
        images: Mapping[str, object] | Sequence[Image] | None = None,
        image_token: int | None = None,
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
                facts[name] = per_token(value, name, token_ids.size)
            for name, value in names.items():
                try:
                    hash(value)
                except TypeError as error:
                    raise DataError(f"{name} is a {type(value).__name__}; give a string, number or tuple") from error
            facts.update(names, ids=token_ids)
            facts["reward"] = None if reward is None else _reward(reward)
            facts["chosen"] = None if chosen is None else _chosen(chosen)
            facts["experts"] = None if experts is None else _experts(experts, token_ids.size)
            for name, sets in (("sampling_mask", sampling_mask), ("teacher_topk", teacher_topk)):
                facts[name] = None if sets is None else IdSets.of(sets, name, token_ids.size)
            if isinstance(kept := facts["sampling_mask"], IdSets):
                facts["sampling_mask"] = kept.beginning_with(token_ids, "sampling_mask")
            if isinstance(topk := facts["teacher_topk"], IdSets) and topk.logprobs is None:
                raise DataError(
                    "teacher_topk has no log-probabilities; give a pair: ids, and as many log-probabilities"
                )
            facts["images"] = () if images is None else checked_images(images, image_token, token_ids)
            facts["image_token"] = image_token
        except DataError as error:
            raise DataError(f"trajectory{'' if id is None else f' {quoted(id)}'}: {error}") from error
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

    def replace(self, **changes: object) -> Self:
        """A copy with the named fields changed; all fields are checked again."""
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        given = [f"{len(self)} tokens"]
        given += [name for name in PER_TOKEN_FACTS if getattr(self, name) is not None]
        given += [name for name in ("experts", "sampling_mask", "teacher_topk") if getattr(self, name) is not None]
        given += [f"{len(self.images)} image{'s'[: len(self.images) > 1]}"] if self.images else []
        scalars = ("reward", "group", "pair", "chosen", "id", "key", "episode")
        given += [f"{name}={getattr(self, name)!r}" for name in scalars if getattr(self, name) is not None]
        return f"Trajectory({', '.join(given)})"


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
    except (TypeError, ValueError, OverflowError) as error:
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


def expert_array(experts: ArrayLike) -> Shaped[np.ndarray, "L layers k"]:
    """Recorded experts as an array. Raises DataError for anything else than three dimensions."""
    try:
        array = np.asarray(experts)
    except ValueError as error:
        raise DataError(f"experts are no [L, layers, k] block of numbers ({shortened(error)})") from error
    if array.ndim != 3:
        raise DataError(f"experts have shape {array.shape}, expected [L, layers, k]")
    return array


def _experts(experts: ArrayLike, length: int) -> Int16[np.ndarray, "L layers k"]:
    array = expert_array(experts)
    if len(array) != length:
        hint = "; give -1 for a token whose experts were not recorded" if len(array) == length - 1 else ""
        raise DataError(f"experts have shape {array.shape}, expected [{length}, layers, k]{hint}")
    if array.size and array.dtype.kind not in "iu":
        raise DataError(f"experts are of type {array.dtype}, expected whole numbers")
    most = int(np.iinfo(np.int16).max)
    if array.size and not -1 <= array.min() <= array.max() <= most:
        bad = array.min() if array.min() < -1 else array.max()
        raise DataError(f"experts hold {bad}; they are numbered 0 to {most}, and -1 where none was recorded")
    ordered = np.sort(array, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    wrong = (twice.any(-1) | ((array < 0).any(-1) & (array >= 0).any(-1))) if array.size else np.zeros((0, 0), bool)
    if wrong.any():
        token, layer = np.argwhere(wrong)[0].tolist()
        raise DataError(
            f"experts[{token}][{layer}] = {array[token, layer].tolist()}; the experts of a token differ, and -1 stands "
            "for all of them or none"
        )
    return np.array(array, np.int16, order="C")


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
