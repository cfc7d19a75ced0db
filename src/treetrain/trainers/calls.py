"""A call of a trainer's model: what it asks for, and which of its arguments trees know."""

import inspect
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn

from treetrain.core.engine.ranks import Ranks
from treetrain.core.hf.capability import causal_lm
from treetrain.layers.images.image_rows import IMAGE_INPUTS, IMAGE_TYPES
from treetrain.trainers.batches import TOKEN_TYPES, TREE_INDEX, ModelInputs

KNOWN_ARGUMENTS = {
    *("input_ids", "attention_mask", "position_ids", "labels", "use_cache", "return_dict", "output_router_logits"),
    *("num_items_in_batch", "fused_lm_head", "seq_idx"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *TREE_INDEX,
    *("tree_max_seqlen_q", "tree_max_seqlen_k", "shift_labels"),
}
"""Keyword arguments of the model's forward that a tree supports."""
CACHES = ("past_key_values", "cache")
"""Names of the model's argument for the keys and values of a generation: before transformers 5.24, and since."""
MEDIA = ("pixel_", "image_", "video_", "input_features", "audio_")
"""Beginnings of the names of keyword arguments that carry images, videos or sound."""


class Asks(Enum):
    """The kinds of answers that a call may ask a model for."""

    SCORES = "the scores of labels"
    """A tree answers it."""
    OUTPUT = "its output"
    """Its own forward answers it."""
    OUTPUT_OR_SCORES = "an output without labels"
    """A loss of the user's own gets an output, which may still be asked for log-probabilities (`TreeOutput`)."""
    LOGPROBS = "tt.token_logprobs"
    """A tree answers it too."""
    LOGPROBS_AT_IDS = "tt.token_logprobs with ids"


class Call(NamedTuple):
    """A call of the model's forward, and the moment at which it comes."""

    args: tuple
    """Arguments without a name."""
    inputs: ModelInputs
    """Arguments by name."""
    in_loss: bool
    """Whether the trainer is in `compute_loss`."""
    reads_logits: bool
    """Whether the trainer evaluates, and reads logits beside the loss."""
    loss_follows: bool
    """Whether a loss is computed from the output, in a ``compute_loss_func`` or with gradients."""

    @property
    def generates(self) -> bool:
        """Whether it has no rows of tokens, or continues some by a cache."""
        return self.inputs.get("input_ids") is None or any(self.inputs.get(name) is not None for name in CACHES)

    @property
    def has_labels(self) -> bool:
        """Whether it has ``labels``."""
        return self.inputs.get("labels") is not None


def agreed(ranks: Ranks, asks: Asks, *, unknown: bool = False) -> Asks:
    """Tell what a call asks the model for. Ranks that run every pass together must agree on it.

    Args:
        unknown: the call has arguments that trees do not know.

    Raises:
        RanksDisagree: on all of these ranks; they ask for different things.
    """
    asked, any_unknown = zip(*ranks.exchange((asks, unknown)))
    of_forward = {*asked} <= {Asks.SCORES, Asks.OUTPUT} and (Asks.OUTPUT in asked or any(any_unknown))
    if of_forward and not torch.is_grad_enabled():
        return Asks.OUTPUT  # the plain forward gives scores too, and no gradient is at stake
    if len({*asked}) > 1:
        ranks.same({"what the loss asks the model for": asks.value})
    return asks


def by_name(model: nn.Module, args: tuple, kwargs: ModelInputs) -> ModelInputs:
    """All arguments of a call by the names that the model's forward has for them."""
    # A PeftModel without a task takes any arguments and hands them on.
    for kind in (type(model), type(causal_lm(model))):
        parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
        if parameters and parameters[0].kind is parameters[0].POSITIONAL_OR_KEYWORD:
            return dict(zip([parameter.name for parameter in parameters], args)) | kwargs
    return kwargs


def image_arguments(model: nn.Module, given: Iterable[str]) -> set[str]:
    """Those of a call's arguments that give the model images, if trees of this model compute images."""
    images = {*IMAGE_INPUTS, IMAGE_TYPES} & {*given}
    if not images:
        return images
    from treetrain.layers.images.encoders import arguments_of, image_encoder, takes_images

    inner = image_encoder(model)
    if inner is None or not takes_images(model):
        return set()
    return images & {*arguments_of(inner), IMAGE_TYPES}


def unknown_arguments(model: nn.Module, inputs: ModelInputs) -> list[str]:
    """Those of a call's arguments that are not known to be exact on a tree; token types that are all text are."""
    known = KNOWN_ARGUMENTS | image_arguments(model, inputs)
    unknown = [name for name, value in inputs.items() if name not in known and value is not None]
    return sorted(name for name in unknown if name not in TOKEN_TYPES or inputs[name].any())


def refused_arguments(unknown: list[str]) -> ValueError:
    """The error for a call with arguments of these names, which trees do not know."""
    from treetrain.layers.images.encoders import FAMILIES

    if media := [name for name in unknown if name.startswith(MEDIA) or name in TOKEN_TYPES]:
        return ValueError(
            f"the batch has images ({', '.join(media)}), which share_prefixes does not compute on trees of this model: "
            f"it takes rows of text, and images ({', '.join(IMAGE_INPUTS)}, no videos) of {', '.join(FAMILIES)}; leave "
            "such rows out, or train without share_prefixes"
        )
    return ValueError(
        f"the model is called with {', '.join(unknown)}, which is not known to be exact on a tree; leave it "
        "out of the batch, or train without share_prefixes"
    )
