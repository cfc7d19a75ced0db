"""Images of rows as a model's processor prepares them, and the tokens that stand for them.

Tokens of images are merged only if their images are equal. So each feature of each distinct image gets a number of its
own below 0, by which rows are merged.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple, cast

import numpy as np
from jaxtyping import Int32, Int64, Integer
from numpy.typing import NDArray

from treetrain.core.errors import DataError, quoted
from treetrain.core.tree.token_tree import TokenTree
from treetrain.core.tree.trajectory import Numbered, Trajectory

GRID = "image_grid_thw"
"""The processors' name for the patches of each image: times, rows and columns."""
SIZES = "image_sizes"
"""The processors' name for the height and width of each image, without padding to the largest of a batch."""
IMAGE_INPUTS = ("pixel_values", GRID, SIZES)
"""The arguments by which models read images."""
IMAGE_TYPES = "mm_token_type_ids"
"""The argument by which models with positions of their own around images read what a token is: text 0, image 1."""


@dataclasses.dataclass(frozen=True, eq=False)
class Image:
    """One image, or one tile of it: the arrays that a processor makes of it, by the names of the model's arguments.

    The first dimension of every array is that of the processor's output: images, tiles or patches.
    """

    inputs: Mapping[str, NDArray[np.generic]]

    @cached_property
    def digest(self) -> bytes:
        """A hash of the content. Images with equal digests are one image."""
        total = blake2b(digest_size=16)
        for name, array in sorted(self.inputs.items()):
            total.update(f"{name} {array.dtype.str} {array.shape} ".encode())
            total.update(np.ascontiguousarray(array).data)
        return total.digest()

    def __repr__(self) -> str:
        return f"Image({', '.join(f'{name} {list(array.shape)}' for name, array in self.inputs.items())})"


def split_images(inputs: Mapping[str, object]) -> tuple[Image, ...]:
    """The images in a processor's output for one row, such as its ``pixel_values`` and ``image_grid_thw``.

    Entries that are None are left out. With a grid, ``pixel_values`` holds the patches of all images one after another;
    otherwise every entry has one place for each image or tile. Padding outside of ``image_sizes`` is cut off, since the
    same image has another in another batch.

    Raises:
        DataError: there are no pixel values, videos, or entries whose lengths do not fit together.
    """
    arrays = {name: as_array(name, value) for name, value in inputs.items() if value is not None}
    for name in arrays:
        if "video" in name:
            raise DataError(f"images have {name}: rows with videos are not computed on a tree; give images alone")
    if "pixel_values" not in arrays:
        raise DataError(f"images have {', '.join(arrays) or 'nothing'}; give pixel_values, as the processor made them")
    grid = arrays.get(GRID)
    if grid is not None:
        grid = arrays[GRID] = grid.reshape(-1, 3)
    lengths = {name: [1] * len(array) for name, array in arrays.items()}
    if grid is not None:
        lengths["pixel_values"] = grid.prod(1).tolist()  # patches of all images, one after another
    for name, array in arrays.items():
        if len(lengths[name]) != len(lengths["pixel_values"]) or sum(lengths[name]) != len(array):
            shapes = ", ".join(f"{other} {list(x.shape)}" for other, x in arrays.items())
            wanted = f", with {sum(lengths['pixel_values'])} patches by {GRID}" if grid is not None else ""
            raise DataError(f"images have {shapes}: {name} does not fit the others{wanted}")
    pieces = {name: np.split(array, np.cumsum(lengths[name])[:-1]) for name, array in arrays.items()}
    if SIZES in arrays and arrays["pixel_values"].ndim == 4:
        pieces["pixel_values"] = list(map(_without_padding, pieces["pixel_values"], pieces[SIZES]))
    count = len(lengths["pixel_values"])
    return tuple(Image({name: pieces[name][number] for name in arrays}) for number in range(count))


def _without_padding(pixels: NDArray[np.generic], size: NDArray[np.integer]) -> NDArray[np.generic]:
    """The pixels [1, channels, height, width] of an image of this size [1, 2]."""
    if size.shape != (1, 2) or not (0 < size[0, 0] <= pixels.shape[2] and 0 < size[0, 1] <= pixels.shape[3]):
        raise DataError(
            f"{SIZES} has {size[0].tolist()} for pixel_values {list(pixels.shape[1:])}; give its height and width"
        )
    return pixels[:, :, : size[0, 0], : size[0, 1]]


def as_array(name: str, value: Any) -> NDArray[Any]:
    """The value as an array of numbers of its own; bfloat16 tensors become float32, which changes no number."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    array = np.array(value, order="C")
    if array.dtype.kind not in "iufb" or array.ndim == 0:
        raise DataError(f"{name} of the images is {quoted(value)}; give an array of numbers, as the processor made it")
    return array


def places_of_images(
    rows: Sequence[Integer[np.ndarray, " _"]], image_token: int, images: Sequence[Image]
) -> list[list[Int64[np.ndarray, " _"]]]:
    """For each row, the places of the tokens that stand for each of its images.

    Each run of the placeholder token stands for an image. In some families other tokens divide an image (its lines), or
    a run stands for several tiles. Then the numbers of runs and images differ, and the images' shares of the tokens
    are their shares of the pixels. The model checks them by the number of features.

    Args:
        images: those of all rows, in the rows' order.

    Raises:
        DataError: the tokens of the rows do not fit the images.
    """
    places = [np.flatnonzero(ids == image_token) for ids in rows]
    runs = [run for own in places for run in np.split(own, np.flatnonzero(np.diff(own) != 1) + 1) if len(run)]
    lengths = list(map(len, runs))
    if len(lengths) != len(images):
        pixels = np.array([image.inputs["pixel_values"].size for image in images], np.int64)
        tokens, rest = np.divmod(pixels * sum(lengths), max(int(pixels.sum()), 1))
        if GRID in images[0].inputs or rest.any() or not tokens.all():  # with a grid, runs and images are as many
            raise DataError(
                f"there are {len(images)} images and {len(lengths)} runs of image_token {image_token} in the ids; give "
                "one image for each run, and cut rows only behind or before whole images"
            )
        lengths = tokens.tolist()
    bounds, ends = np.cumsum(lengths), np.cumsum([len(own) for own in places])
    counts = np.searchsorted(bounds, ends, side="right")
    if (np.r_[0, bounds][counts] != ends).any():  # an image's tokens would be in two rows
        raise DataError(
            f"the rows have {[len(own) for own in places]} tokens {image_token}, their images {lengths}; give the "
            "images of these rows, and cut rows only behind or before whole images"
        )
    divided = [np.split(own, np.cumsum(lengths[a:b])[:-1]) for own, a, b in zip(places, np.r_[0, counts], counts)]
    return [own if len(own[0]) else [] for own in divided]


def checked_images(
    images: Mapping[str, object] | Sequence[Image], image_token: int | None, ids: Int32[np.ndarray, " L"]
) -> tuple[Image, ...]:
    """The images of a row; raises DataError unless the row has one run of placeholders for each."""
    found = split_images(images) if isinstance(images, Mapping) else tuple(images)
    for image in found:
        if not isinstance(image, Image):
            raise DataError(
                f"images hold a {type(image).__name__}; give the processor's output for the row, a dictionary with "
                "pixel_values"
            )
    if not found:
        return ()
    if image_token is None:
        raise DataError(
            "images are given without image_token; give the id that stands for them in the row: "
            "model.config.image_token_id"
        )
    places_of_images([ids], image_token, found)
    return found


# ---- in a tree


class TreeImages(NamedTuple):
    """The distinct images of a tree, and the tokens that stand for them."""

    token: int
    """The id of these tokens."""
    distinct: Sequence[Image]
    first: Int64[np.ndarray, " images_plus_1"]
    """The features of image m are first[m] to first[m + 1], one for each of its tokens."""
    feature: Int64[np.ndarray, " N"]
    """The feature that each token of the tree stands for; -1 for text."""


def tree_images(tree: TokenTree) -> TreeImages | None:
    """The images of the rows of a tree; None for text."""
    return cast("TreeImages | None", tree.special.get("images"))


class ImageTokens:
    """Puts a number below 0, one for each feature of each distinct image, in the place of its token. A `SpecialTokens`.

    The number of feature f is -1 - f.
    """

    name = "images"

    def number(
        self, rows: Sequence[Trajectory | None], flat: Int32[np.ndarray, " flat"], lengths: Int64[np.ndarray, " K"]
    ) -> Numbered | None:
        """See `SpecialTokens`.

        Raises:
            DataError: rows with different placeholder tokens, or a row with this token and without images.
        """
        given = [getattr(row, self.name, ()) for row in rows]
        if not any(given):
            return None
        tokens = [getattr(row, "image_token", None) for row in rows]
        token = cast("int", next(own for own, images in zip(tokens, given) if images))
        names, ends = flat.copy(), np.cumsum(lengths)
        first, distinct, seen = [0], list[Image](), dict[tuple[bytes, int], int]()
        for number, (images, end, length) in enumerate(zip(given, ends.tolist(), lengths.tolist())):
            ids = flat[end - length : end]
            if not images:
                if (ids == token).any():
                    raise DataError(
                        f"row {number} has the token {token}, which stands for images in other rows, at position "
                        f"{int((ids == token).argmax())}, and no images; give its images, or leave the row out"
                    )
                continue
            if tokens[number] != token:
                raise DataError(
                    f"row {number} has image_token {tokens[number]}, an earlier row {token}; all rows of a batch are "
                    "read by one model"
                )
            for image, places in zip(images, *places_of_images([ids], token, images)):
                key = image.digest, len(places)
                if key not in seen:
                    seen[key] = len(distinct)
                    distinct.append(image)
                    first.append(first[-1] + key[1])
                begins = first[seen[key]]
                names[end - length + places] = -1 - np.arange(begins, begins + key[1])
        begins_at = np.array(first, np.int64)

        def restore(numbers: Int32[np.ndarray, " N"]) -> tuple[Int32[np.ndarray, " N"], TreeImages]:
            features = np.where(numbers < 0, -1 - numbers.astype(np.int64), -1)
            return np.where(numbers < 0, np.int32(token), numbers), TreeImages(token, distinct, begins_at, features)

        return Numbered(names, restore)
