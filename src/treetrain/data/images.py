"""Images of a row as a model's processor prepares them, and the tokens that stand for them."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer
from numpy.typing import NDArray

from treetrain.errors import DataError, quoted

GRID = "image_grid_thw"
"""The processors' name for the patches of each image: times, rows and columns."""


@dataclasses.dataclass(frozen=True, eq=False)
class Image:
    """One image: the arrays that a processor makes of it, by the names that the model's forward gives them.

    The first dimension of every array is that of the processor's output: images, tiles or patches.
    """

    inputs: Mapping[str, NDArray[Any]]

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


def split_images(inputs: Mapping[str, Any]) -> tuple[Image, ...]:
    """The images in a processor's output for one row, such as its ``pixel_values`` and ``image_grid_thw``.

    Entries that are None are left out. With a grid, ``pixel_values`` holds the patches of all images one after another;
    otherwise every entry has one place for each image.

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
        lengths["pixel_values"] = grid.prod(1).tolist()
    for name, array in arrays.items():
        if len(lengths[name]) != len(lengths["pixel_values"]) or sum(lengths[name]) != len(array):
            shapes = ", ".join(f"{other} {list(x.shape)}" for other, x in arrays.items())
            wanted = f", with {sum(lengths['pixel_values'])} patches by {GRID}" if grid is not None else ""
            raise DataError(f"images have {shapes}: {name} does not fit the others{wanted}")
    pieces = {name: np.split(array, np.cumsum(lengths[name])[:-1]) for name, array in arrays.items()}
    count = len(lengths["pixel_values"])
    return tuple(Image({name: pieces[name][number] for name in arrays}) for number in range(count))


def as_array(name: str, value: Any) -> NDArray[Any]:
    """The value as an array of numbers of its own; bfloat16 tensors become float32, which changes no number."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    array = np.array(value, order="C")
    if array.dtype.kind not in "iufb" or array.ndim == 0:
        raise DataError(f"{name} of the images is {quoted(value)}; give an array of numbers, as the processor made it")
    return array


def image_runs(
    ids: Integer[np.ndarray, " L"], image_token: int
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """Where each image of a row begins and ends: the maximal runs of its placeholder token."""
    of_image: Bool[np.ndarray, " L"] = ids == image_token
    edges = np.diff(of_image.astype(np.int8), prepend=0, append=0)
    return np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)


def checked_images(
    images: Mapping[str, Any] | Sequence[Image], image_token: int | None, ids: Int32[np.ndarray, " L"]
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
    starts, _ = image_runs(ids, image_token)
    if len(starts) != len(found):
        raise DataError(
            f"there are {len(found)} images and {len(starts)} runs of image_token {image_token} in the ids; give one "
            "image for each run, and cut rows only behind or before whole images"
        )
    return found
