"""The image encoder of a Hugging Face model for images and text: its features, and the positions around them.

A model's own forward calls its ``get_image_features``, and puts the features into the embeddings at the tokens that
stand for the image (Qwen3-VL adds others to the hidden states there). Here the features of the distinct images of a
tree are computed beforehand, by the same function, and handed to the forward in its place.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from treetrain.core.errors import DataError, UnsupportedModel
from treetrain.core.hf.capability import causal_lm, model_device
from treetrain.core.hf.tree_mode import replaced
from treetrain.core.tree import trajectory as core
from treetrain.core.tree.token_tree import Row, TokenTree
from treetrain.layers.images.image_rows import GRID, IMAGE_INPUTS, IMAGE_TYPES, SIZES, Image, TreeImages, tree_images
from treetrain.layers.trajectory import Trajectory

FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("mistral3", "internvl", "llava"),
)
"""The model types whose images are computed on trees; tests prove each of them against its rows."""
BOTH_DIRECTIONS = (
    ": tokens of an image see each other in both directions there, and a part of a tree may end within an image, whose "
    "first tokens see its last ones"
)
"""Why Gemma 3 is not among them."""


class ImageFeatures(NamedTuple):
    """The encoder's output for F tokens of images, by kind: those of the embeddings, then those of each deep layer."""

    kinds: list[Float[Tensor, "F hidden"]]
    as_tensor: list[bool]
    """For each kind, whether the model's own function returns it as one tensor, and not as one for each image."""


@dataclass
class _FeaturesGiven(ModelOutput):
    """The part of ``get_image_features`` that a model's forward reads, and returns within its own output."""

    pooler_output: Tensor | tuple[Tensor, ...] | None = None
    deepstack_features: list[Tensor | tuple[Tensor, ...]] | None = None


class ImageModel(Protocol):
    """The module of a model for images and text that holds its encoder and its language model."""

    visual: Any
    language_model: nn.Module
    get_image_features: Callable[..., Any]

    def children(self) -> Iterator[nn.Module]: ...


def image_encoder(model: nn.Module) -> ImageModel | None:
    """The module with ``get_image_features`` and the language model; None for a model of text."""
    inner: Any = getattr(causal_lm(model), "model", None)
    has_both = hasattr(inner, "get_image_features") and hasattr(inner, "language_model")
    return inner if has_both else None


def encoder_modules(inner: ImageModel) -> list[nn.Module]:
    """The modules that make features of images: all but the language model."""
    return [child for child in inner.children() if child is not inner.language_model]


def is_trained(inner: ImageModel) -> bool:
    """Whether some weight of the encoder is trained."""
    return any(p.requires_grad for part in encoder_modules(inner) for p in part.parameters())


def takes_images(model: nn.Module) -> bool:
    """Whether images are known to be exact on trees of this model."""
    return image_encoder(model) is not None and causal_lm(model).config.model_type in FAMILIES


def check_images(model: nn.Module, tree: TokenTree) -> None:
    """Check that the images of a tree are computed exactly, before any work.

    Raises:
        UnsupportedModel: a family whose images are not known to be exact on a tree; names those that are.
        DataError: images that this model cannot read, or that do not fit their tokens.
    """
    images = tree_images(tree)
    inner = image_encoder(model)
    lm = causal_lm(model)
    config = lm.config
    if images is None:
        return
    if inner is None or not takes_images(model):
        why = BOTH_DIRECTIONS if config.model_type == "gemma3" else ""
        raise UnsupportedModel(
            f"rows with images on {type(lm).__name__} ({config.model_type}) are not known to be exact on a tree{why}; "
            f"they are on {', '.join(FAMILIES)}. Rows of text work: leave the images out, or train without a tree."
        )
    if images.token != config.image_token_id:
        raise DataError(
            f"the rows have image_token {images.token}, {type(lm).__name__} has {config.image_token_id}; give "
            "image_token=model.config.image_token_id"
        )
    known, first = arguments_of(inner), images.distinct[0].inputs
    for image in images.distinct:
        if any(name not in known for name in image.inputs) or any(
            known[name] and name not in image.inputs for name in known
        ):
            raise DataError(
                f"an image has {', '.join(image.inputs)}; {type(lm).__name__} reads {' and '.join(known)}, as its own "
                "processor makes them"
            )
        shapes = [given["pixel_values"].shape[1:] for given in (first, image.inputs)]
        if SIZES not in image.inputs and shapes[0] != shapes[1]:
            raise DataError(
                f"images have pixel_values of shapes {list(shapes[0])} and {list(shapes[1])} in one batch; give images "
                "of one processor"
            )
    if GRID in known:
        grids = np.concatenate([image.inputs[GRID] for image in images.distinct])
        _check_features(images, grids.prod(1) // inner.visual.spatial_merge_size**2)


def arguments_of(inner: ImageModel) -> dict[str, bool]:
    """The arguments by which a model reads images, and whether each must be given."""
    given = inspect.signature(inner.get_image_features).parameters
    return {name: name == GRID or given[name].default is inspect._empty for name in IMAGE_INPUTS if name in given}


def reads_token_types(inner: ImageModel | None) -> bool:
    """Whether positions depend on which tokens are of images, so that the model must be told by `IMAGE_TYPES`."""
    return hasattr(inner, "get_rope_index")


def _check_features(images: TreeImages, features: Sequence[int] | np.ndarray) -> None:
    """Raise DataError unless every distinct image has as many features as tokens."""
    for image, count, tokens in zip(images.distinct, features, np.diff(images.first)):
        if count != tokens:
            given = ", ".join(f"{name} {x[0].tolist()}" for name, x in image.inputs.items() if name != "pixel_values")
            given = given or f"pixel_values {list(image.inputs['pixel_values'].shape)}"
            raise DataError(
                f"an image with {given} has {count} features, but {tokens} tokens {images.token} stand for it; give "
                "ids and images of one call of the processor, uncut"
            )


def with_images(
    model: nn.Module, rows: Sequence[Row] | TokenTree, images: Sequence[Mapping[str, object] | None]
) -> list[Trajectory]:
    """The rows with their images.

    Args:
        images: for each row the processor's output, with the images of this row alone, or None.

    Raises:
        DataError: a tree in the place of rows, a different number of rows, or images that do not fit their row.
        UnsupportedModel: a model of text.
    """
    if isinstance(rows, TokenTree):
        raise DataError("images are given beside a tree, which has merged its rows; give the rows themselves")
    lm = causal_lm(model)
    token = getattr(lm.config, "image_token_id", None)
    if token is None and any(own is not None for own in images):
        raise UnsupportedModel(f"images are given for {type(lm).__name__}, which reads text alone; leave them out")
    if len(images) != len(rows):
        raise DataError(f"images has {len(images)} entries, the batch {len(rows)} rows; give one for each, or None")
    found = []
    for row, own in zip(rows, images):
        whole = Trajectory.of(row) if isinstance(row, core.Trajectory) else Trajectory(row)
        found.append(whole if own is None else whole.replace(images=own, image_token=token))
    return found


def image_inputs(row: Trajectory, model: nn.Module) -> dict[str, Tensor]:
    """The keyword arguments by which the model's plain forward reads the images of one row; empty for text."""
    if not row.images:
        return {}
    device, inner = model_device(model), image_encoder(model)
    given = joined_images(row.images, device)
    if reads_token_types(inner):
        given[IMAGE_TYPES] = torch.from_numpy((row.ids == row.image_token).astype(np.int64))[None].to(device)
    return given


def encode_images(inner: ImageModel, inputs: dict[str, Tensor], images: TreeImages | None = None) -> ImageFeatures:
    """The features of `joined_images`, in one call of the encoder.

    Args:
        images: those of the tree.

    Raises:
        DataError: one of them has another number of features than tokens.
    """
    output = inner.get_image_features(**inputs, return_dict=True)
    first, deep = output.pooler_output, getattr(output, "deepstack_features", None) or []
    if images is not None and (not isinstance(first, Tensor) or first.dim() > 2):  # apart for each image
        _check_features(images, [len(one) for one in first])
    kinds = (first, *deep)
    return ImageFeatures([_rows(kind) for kind in kinds], [isinstance(kind, Tensor) for kind in kinds])


def joined_images(images: Sequence[Image], device: torch.device) -> dict[str, Tensor]:
    """The keyword arguments by which a model reads these images; those with sizes are padded to the largest."""
    joined = {}
    for name in images[0].inputs:
        arrays = [image.inputs[name] for image in images]
        if SIZES in images[0].inputs:
            widest = np.max([array.shape for array in arrays], axis=0)
            arrays = [np.pad(x, [(0, 0), *((0, n) for n in (widest - x.shape)[1:])]) for x in arrays]
        joined[name] = torch.from_numpy(np.concatenate(arrays)).to(device)
    return joined


def _rows(features: Tensor | Sequence[Tensor]) -> Float[Tensor, "F hidden"]:
    whole = features if isinstance(features, Tensor) else torch.cat(list(features))
    return whole.flatten(0, -2)


@contextmanager
def own_attention(inner: ImageModel, implementations: dict[int, str]) -> Iterator[None]:
    """Within the block, which is in tree mode, the encoder's attention is its own: backward may run its layers again.

    Args:
        implementations: what `attention_of` returned before tree mode.
    """
    with ExitStack() as stack:
        for config in _configs(inner):
            own = implementations[id(config)]
            stack.enter_context(replaced(config, _attn_implementation_internal=own))
        yield


def attention_of(inner: ImageModel) -> dict[int, str]:
    """The attention implementations of the encoder's configurations, by their identity."""
    return {id(config): config._attn_implementation_internal for config in _configs(inner)}


def _configs(inner: ImageModel) -> list[Any]:
    found = [getattr(module, "config", None) for part in encoder_modules(inner) for module in part.modules()]
    return [config for config in found if hasattr(config, "_attn_implementation_internal")]


@contextmanager
def features_given(inner: ImageModel, take: Callable[[], ImageFeatures]) -> Iterator[None]:
    """Within the block the model's forward takes the features of the tokens of a pass from `take`."""

    def get_image_features(*_args: object, **_kwargs: object) -> _FeaturesGiven:
        first, *deep = [kind if whole else (kind,) for kind, whole in zip(*take())]
        return _FeaturesGiven(first, deep)

    with replaced(inner, get_image_features=get_image_features):
        yield


def path_positions(inner: ImageModel, tree: TokenTree) -> Int64[np.ndarray, "4 N"] | None:
    """The positions of a tree's tokens on their paths: the place in the row, and the three of rotary embeddings.

    Each row's are those of the model itself, so text after an image continues from the image's largest position. All
    rows through a token have the same images up to it, so they agree. None for a model that counts tokens.
    """
    if not reads_token_types(inner):
        return None
    positions = np.repeat(tree.depth.astype(np.int64)[None], 4, axis=0)
    for number, row in enumerate(tree.rows):
        if isinstance(row, Trajectory) and row.images:
            positions[1:, tree.path(number)] = rotary_positions(inner, row)
    return positions


def rotary_positions(inner: Any, row: Trajectory) -> Int64[np.ndarray, "3 L"]:
    """The three positions of each token of a row with images, from the model's own function."""
    ids = torch.from_numpy(row.ids.astype(np.int64))[None]
    types = (ids == row.image_token).long()
    grid = torch.from_numpy(np.concatenate([image.inputs[GRID] for image in row.images]))
    positions, _ = inner.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grid)
    return positions[:, 0].numpy()
