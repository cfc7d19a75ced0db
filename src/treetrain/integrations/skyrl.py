# pyright: reportMissingImports=false
"""SkyRL: its FSDP policy worker with every shared prefix of a mini-batch computed once.

Give SkyRL this worker in place of its own, in the process that builds the trainer, before it does::

    import ray
    from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker
    from treetrain.integrations.skyrl import TreePolicyWorker

    fsdp_worker.PolicyWorker = ray.remote(num_gpus=1)(TreePolicyWorker)

All rows that a process gets in a call of `forward_backward` or `forward` are scored as one tree. SkyRL's own code then
runs over its micro-batches as always: losses, metrics and their order are its own. Only the model that it calls is
replaced, by one that looks the scores up. After the last micro-batch the tree runs backward once.

Experts that the rollout recorded (``rollout_expert_indices``) replace the routers' choices. Rows may have images
(``pixel_values``, ``image_grid_thw``); a row of text beside them has empty ones, as SkyRL's lists of tensors ask for.
Steps whose responses train a turn again count it once after `count_tokens_once`.
"""

import functools
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
from torch import Tensor
from transformers import AutoConfig

from treetrain.core.engine.score import Scored
from treetrain.core.errors import DataError, UnsupportedModel
from treetrain.core.hf.capability import causal_lm
from treetrain.engine import TreeEngine
from treetrain.layers.experts.recorded import without_fill
from treetrain.layers.images.image_rows import IMAGE_INPUTS, Image, as_array
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.once import count_once, repeats


class TreePolicyWorker(FSDPPolicyWorkerBase):
    """SkyRL's FSDP policy worker; log-probabilities, entropies and gradients come from a prefix tree.

    ``max_tokens_per_microbatch`` (or the longest row times the rows of a micro-batch) is the budget of tokens whose
    graph is alive at once. What does not fit is recomputed; no row is left out, however long.

    Raises:
        ValueError: a setting of SkyRL's configuration that cannot be exact on a tree, before the model is loaded.
        UnsupportedModel: the model, packed rows, sampling masks, or images for a model without its encoder.
        DataError: recorded experts that are not those of the model; images that do not fit their row.
    """

    def init_model(self, *args: object, **kwargs: object) -> None:
        check_settings(self.cfg)
        super().init_model(*args, **kwargs)

    def forward_backward(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a mini-batch's gradients, as SkyRL does, with one backward through the tree of all its rows."""
        with self._model_from_tree(data, self.cfg.micro_train_batch_size_per_gpu) as scored:
            output = super().forward_backward(data, *args, **kwargs)
        scored.backward()  # averages over the ranks, as FSDP2 does
        output.metrics["tree/overlap"] = 1 - scored.unique_tokens / scored.flat_tokens
        return output

    def forward(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute log-probabilities, or a loss without gradient, as SkyRL does."""
        with torch.no_grad(), self._model_from_tree(data, self.cfg.micro_forward_batch_size_per_gpu):
            return super().forward(data, *args, **kwargs)

    def _forward_backward_micro(self, experience: Any, *args: Any, **kwargs: Any) -> Any:
        self.model.recorded = experience.rollout_expert_indices
        return super()._forward_backward_micro(experience, *args, **kwargs)

    def _forward_micro_batch(self, micro_batch: Any) -> Any:
        self.model.recorded = micro_batch.get("rollout_expert_indices")
        return super()._forward_micro_batch(micro_batch)

    def _forward_micro_with_loss(self, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.model.recorded = micro_batch.get("rollout_expert_indices")
        return super()._forward_micro_with_loss(micro_batch, *args, **kwargs)

    @contextmanager
    def _model_from_tree(self, data: Any, rows_at_once: int) -> Iterator[Scored]:
        """Score the batch; inside the block SkyRL's calls of the model get these scores."""
        model: Any = self.model
        lengths = data["attention_mask"].sum(1)
        budget = self.cfg.max_tokens_per_microbatch
        budget = budget if budget > 0 else rows_at_once * int(lengths.max())
        engine = TreeEngine(model.model, budget=budget, temperature=self.cfg.algorithm.temperature)
        model.train(torch.is_grad_enabled())
        with engine.sharing.passes_with.together(
            "TreePolicyWorker"
        ):  # else other ranks would wait for one that refuses
            check_batch(data, model)
            rows = RowsOfBatch(causal_lm(model.model), data)
        scores = ScoresOfRows(engine, rows, entropies=torch.is_grad_enabled())
        self.model = scores
        try:
            yield scores.scored
        finally:
            self.model = model


def check_batch(data: Any, model: Any) -> None:
    """Raise UnsupportedModel for a batch with what a tree of its rows cannot have, or SkyRL's model would leave out."""
    if data.get("sub_seq_lengths") is not None:
        raise UnsupportedModel(
            "the batch has sub_seq_lengths, which no tree of SkyRL's rows supports yet; use PolicyWorker"
        )
    kept = [name for name in data if ("sampling_mask" in name or "sample_support" in name) and data[name] is not None]
    if kept:
        raise UnsupportedModel(
            f"the batch has {kept[0]}, and SkyRL's old and reference log-probabilities are not over the ids that a "
            "sampler kept: sample with top_p=1.0 and top_k=-1, or train by TreeTrainer "
            "(Trajectory(sampling_mask=...))"
        )
    if (given := [name for name in IMAGE_INPUTS if data.get(name) is not None]) and not model.is_vlm:
        raise UnsupportedModel(
            f"the batch has {' and '.join(given)}, and SkyRL loaded {type(causal_lm(model.model)).__name__}, "
            "without an encoder: its own worker would leave the images out in silence. Set "
            "policy.language_model_only=False for a model with an encoder, or send no images"
        )


class RowsOfBatch:
    """The rows of a batch, each once: equal ones have equal scores, and share a leaf that gets both gradients.

    Args:
        model: the Hugging Face model.
        data: sequences and attention_mask [B, S], and response_length in its metadata; rollout_expert_indices
            [B, S, layers, k] if experts were recorded; pixel_values and image_grid_thw of each row if there are images.

    Raises:
        DataError: image tokens without images, experts that may be fill.
    """

    def __init__(self, model: Any, data: Any):
        self.actions: int = data.metadata["response_length"]
        pictured = any(data.get(name) is not None for name in IMAGE_INPUTS)
        token = model.config.image_token_id if pictured else None
        self.rows: list[Trajectory] = []
        self.masks: list[Tensor] = []
        """For each row the predictions that belong to its response."""
        self.images: list[Any] | None = [] if pictured else None
        self.places: dict[Any, int] = {}
        """The number in `rows` of a batch's row, by `row_key`."""
        recorded = data.get("rollout_expert_indices")
        for number, (ids, real) in enumerate(zip(data["sequences"].cpu(), data["attention_mask"].cpu().bool())):
            experts = None if recorded is None else recorded[number].cpu()
            images = images_of_row(data, number)
            if pictured and not images and (count := int((ids[real] == token).sum())):
                raise DataError(
                    f"row {number} of SkyRL's batch has {count} tokens {token}, which stand for images, and no images: "
                    "in SkyRL's micro-batches it would take those of other rows; give its images"
                )
            key = row_key(ids, real, experts, images)
            if key in self.places:
                continue
            self.places[key] = len(self.rows)
            chosen = None
            if experts is not None:
                name = f"rollout_expert_indices of row {number} of SkyRL's batch"
                chosen = without_fill(experts[real].numpy(), name, "switch the recording off")
            self.rows.append(Trajectory(ids[real], experts=chosen, id=f"row {number} of SkyRL's batch"))
            self.masks.append(torch.nonzero(real)[1:, 0] >= len(ids) - self.actions)
            if self.images is not None:
                self.images.append(images or None)


class ScoresOfRows:
    """Takes the place of SkyRL's model: called with rows of a batch, it returns the scores that a tree gave them.

    Args:
        entropies: whether to score these too.
    """

    recorded: Tensor | None = None
    """The recorded experts of the rows that are asked for next."""

    def __init__(self, engine: TreeEngine, batch: RowsOfBatch, *, entropies: bool):
        self._places, device = batch.places, engine.prepared.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):  # as around SkyRL's own calls
            given: dict[str, Any] = {} if batch.images is None else {"images": batch.images}
            self.scored = engine.score(batch.rows, entropies=entropies, mask=batch.masks, **given)

    def train(self) -> None:
        """Do nothing: the model is in the mode that it was scored in."""

    eval = train

    def __call__(
        self,
        sequences: Tensor,
        num_actions: int,
        attention_mask: Tensor,
        temperature: float = 1.0,
        return_output: bool = False,
        compute_entropy: bool = False,
        **others: Any,
    ) -> Any:
        """Return log-probabilities of the last tokens [B, num_actions]; with them, on request, entropies [B, S].

        Padding, and tokens outside of the response, have 0.
        """
        places = self._places_of(sequences, attention_mask, others)
        logprobs = self._arranged(self.scored.logprobs, places, attention_mask)[:, -num_actions - 1 : -1]
        if not return_output:
            return logprobs
        output = {}
        if compute_entropy and self.scored.entropies is not None:
            output["entropy"] = self._arranged(self.scored.entropies, places, attention_mask)
        return logprobs, output

    def _places_of(self, sequences: Tensor, attention_mask: Tensor, others: Mapping[str, Any]) -> list[int | None]:
        """The place of each row among the scored ones; None for SkyRL's filler, which evens out micro-batches."""
        places = []
        for number, (ids, real) in enumerate(zip(sequences.cpu(), attention_mask.cpu().bool())):
            experts = None if self.recorded is None else self.recorded[number].cpu()
            key = row_key(ids, real, experts, images_of_row(others, number)) if real.sum() > 1 else None
            places.append(None if key is None else self._places[key])
        return places

    def _arranged(self, scores: tuple[Tensor, ...], places: list[int | None], attention_mask: Tensor) -> Tensor:
        """Arrange scores as [B, S]: entry t of a row is about token t + 1."""
        rows = []
        for place, real in zip(places, attention_mask):
            whole = torch.zeros(len(real), dtype=torch.float32, device=real.device)
            if place is None:
                whole.requires_grad_(torch.is_grad_enabled())
            else:
                whole = whole.index_copy(0, torch.nonzero(real)[:-1, 0], scores[place].float())
            rows.append(whole)
        return torch.stack(rows)


def images_of_row(given: Mapping[str, Any], number: int) -> dict[str, Tensor]:
    """The images of a row of SkyRL's lists of tensors; empty for text."""
    own = {name: given[name][number] for name in IMAGE_INPUTS if given.get(name) is not None}
    return own if any(map(len, own.values())) else {}


def row_key(ids: Tensor, real: Tensor, experts: Tensor | None, images: Mapping[str, Tensor]) -> bytes:
    """The tokens of a row, where they stand, their recorded experts and a hash of their images."""
    routed = b"" if experts is None else experts[real].long().numpy().tobytes()
    seen = Image({name: as_array(name, x) for name, x in images.items()}).digest if images else b""
    return ids[real].numpy().tobytes() + real.numpy().tobytes() + routed + seen


SUMS_OF_TOKENS = ("regular", "dual_clip", "cispo")
"""The policy losses of SkyRL in which each token's loss depends on that token alone."""


def count_tokens_once() -> None:
    """Have SkyRL's trainer train each sampled token in the first step of its trajectory that holds it.

    With ``generator.step_wise_trajectories`` a step is a row. SkyRL's own generator trains only the new turn of a step,
    so nothing repeats there. Steps of a generator of your own may repeat turns, as those of sub-agents or of a
    rewritten history do. The advantages of all steps of a trajectory are equal in SkyRL, and the log-probabilities that
    count are those of the first step. Call this in the process that builds the trainer.
    """
    from skyrl.train.trainer import RayPPOTrainer

    convert = RayPPOTrainer.convert_to_training_input

    @functools.wraps(convert)
    def convert_counted(self: Any, generator_output: Any, *args: Any, **kwargs: Any) -> Any:
        check_sums_tokens(self.cfg.trainer.algorithm)
        token = None
        if any(images_of_row(generator_output, number) for number in range(len(generator_output["response_ids"]))):
            token = getattr(AutoConfig.from_pretrained(self.cfg.trainer.policy.model.path), "image_token_id", None)
        masks, numbers = once_masks(generator_output, token)
        self.all_metrics.update(numbers)
        return convert(self, {**generator_output, "loss_masks": masks}, *args, **kwargs)

    RayPPOTrainer.convert_to_training_input = convert_counted


def check_sums_tokens(algorithm: Any) -> None:
    """Raise ValueError if SkyRL's loss is no sum over tokens that is divided by their number."""
    for name, allowed in (
        ("loss_reduction", ("token_mean",)),
        ("policy_loss_type", SUMS_OF_TOKENS),
        ("use_kl_loss", (False,)),
        ("use_entropy_loss", (False,)),
        ("off_policy_correction.tis_ratio_type", ("token", None)),  # others are ratios of whole responses
        ("off_policy_correction.sequence_mask_metric", (None,)),
        ("off_policy_correction.outlier_token_is_threshold_low", (None,)),
        ("off_policy_correction.outlier_token_is_threshold_high", (None,)),
    ):
        if (value := operator.attrgetter(name)(algorithm)) not in allowed:
            raise ValueError(
                f"count_tokens_once counts tokens, so the loss must be a mean over tokens: trainer.algorithm.{name}="
                f"{value} is not; set it to {' or '.join(map(str, allowed))}, or do not call count_tokens_once"
            )


def once_masks(
    generator_output: Mapping[str, Any], image_token: int | None = None
) -> tuple[list[list[int]], dict[str, float]]:
    """The loss masks of steps, 0 where an earlier step of the trajectory trains a token; and metrics.

    Log-probabilities of a token may differ between steps: those of the first count, and the largest difference is among
    the metrics.

    Args:
        generator_output: prompt_token_ids, response_ids and loss_masks of each step; trajectory_ids say which belong
            together; rollout_logprobs, rollout_expert_indices, pixel_values and image_grid_thw if there are any.
        image_token: the id that stands for images.

    Raises:
        DataError: there are no trajectory_ids; images without the id that stands for them.
    """
    trajectories = generator_output.get("trajectory_ids")
    if trajectories is None:
        raise DataError(
            "the generator's output has no trajectory_ids, so every row was sampled by itself and no token counts "
            "twice; set generator.step_wise_trajectories=True, or do not call count_tokens_once"
        )
    names = ("prompt_token_ids", "response_ids", "loss_masks")
    experts = generator_output.get("rollout_expert_indices")
    rows = []
    for prompt, response, mask, trajectory in zip(*(generator_output[name] for name in names), trajectories):
        ids, facts = [*prompt, *response], {}
        if experts is not None and len(experts[len(rows)]):
            record = np.asarray(experts[len(rows)])[: len(ids)]
            record = without_fill(record, "rollout_expert_indices of SkyRL", "switch the recording off")
            facts["experts"] = np.concatenate([record, np.full((len(ids) - len(record), *record.shape[1:]), -1)])
        row = Trajectory(
            ids,
            loss_weights=[0] * len(prompt) + [int(x != 0) for x in mask],
            episode=(trajectory.instance_id, trajectory.repetition_id),
            images=images_of_row(generator_output, len(rows)) or None,
            image_token=image_token,
            **facts,
        )
        rows.append(row)
    counted, largest, recorded = count_once(rows), 0.0, generator_output.get("rollout_logprobs")
    if recorded is not None:
        begins = [len(prompt) for prompt in generator_output["prompt_token_ids"]]
        for number, other, at in repeats(rows):
            pair = [np.asarray(recorded[k])[at - begins[k]] for k in (number, other)]
            largest = max(largest, float(np.abs(pair[0] - pair[1]).max()))
    masks = [
        [x if weight else 0 for x, weight in zip(mask, row.weights[len(row) - len(mask) :])]
        for mask, row in zip(generator_output["loss_masks"], counted)
    ]
    trained, once = (sum(int((row.weights != 0).sum()) for row in own) for own in (rows, counted))
    return masks, {"tree/repeated_tokens": 1 - once / max(trained, 1), "tree/repeated_logprob_difference": largest}


def check_settings(config: Any) -> None:
    """Raise ValueError for settings of SkyRL that a tree cannot follow."""
    refused = {
        "policy.sequence_parallel_size": (config.policy.sequence_parallel_size, 1),
        "strategy": (config.strategy, "fsdp"),
    }
    for name, (value, instead) in refused.items():
        if value != instead:
            raise ValueError(f"treetrain's worker for SkyRL: {name}={value} is not supported; set it to {instead}")
