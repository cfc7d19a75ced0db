"""The training row that users make: what a dense model reads of it, and images and recorded experts."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Int16
from numpy.typing import ArrayLike

from treetrain.core.errors import DataError
from treetrain.core.tree import trajectory as core
from treetrain.layers.experts.recorded import RecordedExperts, checked_experts
from treetrain.layers.images.image_rows import Image, ImageTokens, checked_images


@dataclasses.dataclass(frozen=True, slots=True, eq=False, init=False)
class Trajectory(core.Trajectory):
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
        key: anything else that changes the forward, e.g. an adapter's name (which `TreeTrainer` takes for that of the
            model's adapter, if it has several, and None for the active one); rows with different keys share no prefix.
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
            sampling mask without the token itself, log-probabilities above 0 (by more than 0.01, which is rounding) of
            trained tokens or of a teacher's ids.
    """

    special: ClassVar[tuple[core.SpecialTokens, ...]] = (ImageTokens(), RecordedExperts())

    experts: Int16[np.ndarray, "L layers k"] | None
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
        core.Trajectory.__init__(
            self,
            ids,
            loss_weights=loss_weights,
            advantages=advantages,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            rollout_logprobs=rollout_logprobs,
            teacher_logprobs=teacher_logprobs,
            values=values,
            returns=returns,
            reward=reward,
            group=group,
            pair=pair,
            chosen=chosen,
            id=id,
            key=key,
            episode=episode,
            sampling_mask=sampling_mask,
            teacher_topk=teacher_topk,
        )
        try:
            own: dict[str, object] = {
                "experts": None if experts is None else checked_experts(experts, len(self)),
                "images": () if images is None else checked_images(images, image_token, self.ids),
                "image_token": image_token,
            }
        except DataError as error:
            raise core.of_row(id, error) from error
        for name, value in own.items():
            object.__setattr__(self, name, value)  # the class is frozen

    @classmethod
    def of(cls, row: core.Trajectory) -> "Trajectory":
        """The row with these fields as well."""
        if isinstance(row, cls):
            return row
        return cls(**{field.name: getattr(row, field.name) for field in dataclasses.fields(row)})

    def for_losses(self) -> "Trajectory":
        """The row without its images, whose pixels no loss reads."""
        return self.replace(images=None) if self.images else self

    def _specials(self) -> list[str]:
        images = [f"{len(self.images)} image{'s'[: len(self.images) > 1]}"] if self.images else []
        return (["experts"] if self.experts is not None else []) + images
