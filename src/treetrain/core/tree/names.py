"""Numbers that stand for token ids while rows with recorded experts or images are merged.

Tokens with equal ids are merged only if their experts, or their images, are equal too. So each distinct combination
gets a number of its own. `build_tree` merges rows by these numbers, and puts the ids back afterwards.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64
from numpy.typing import NDArray

from treetrain.core.errors import DataError
from treetrain.core.tree.images import Image, places_of_images
from treetrain.core.tree.trajectory import Trajectory


class TreeImages(NamedTuple):
    """The distinct images of a tree, and the tokens that stand for them."""

    token: int
    """The id of these tokens."""
    distinct: Sequence[Image]
    first: Int64[np.ndarray, " images_plus_1"]
    """The features of image m are first[m] to first[m + 1], one for each of its tokens."""
    feature: Int64[np.ndarray, " N"]
    """The feature that each token of the tree stands for; -1 for text."""


def name_by_experts(
    rows: Sequence[Trajectory | None], ids: Int32[np.ndarray, " flat"], lengths: Int64[np.ndarray, " K"]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int16]]:
    """Number every distinct pair of a token id and its recorded experts (-1 where none are recorded).

    Args:
        ids: the rows concatenated.

    Returns:
        names: int32 [flat], the first position of every token's pair.
        ids: int32 [flat], the token id of every name.
        experts: int16 [flat, layers, k], the experts of every name.

    Raises:
        DataError: experts whose shape differs from an earlier row's.
    """
    recorded = {
        k: row.experts for k, row in enumerate(rows) if row is not None and row.experts is not None and len(row)
    }
    shapes = {number: experts.shape[1:] for number, experts in recorded.items()}
    first, shape = next(iter(shapes.items()), (0, (0, 0)))
    for number, other in shapes.items():
        if other != shape:
            raise DataError(
                f"row {number}: experts have {other[0]} layers of {other[1]}, row {first} has {shape[0]} of "
                f"{shape[1]}; all rows of a batch are routed by one model"
            )
    choices = np.full((len(ids), *shape), -1, np.int16)
    ends = np.cumsum(lengths)
    for number, experts in recorded.items():
        choices[ends[number] - len(experts) : ends[number]] = experts
    pairs = np.concatenate([ids.view(np.int16).reshape(-1, 2), choices.reshape(len(ids), -1)], axis=1)
    blob, width = pairs.tobytes(), 2 * pairs.shape[1]
    del pairs  # as large as the recorded experts
    seen: dict[bytes, int] = {}
    names = [seen.setdefault(blob[width * at : width * (at + 1)], at) for at in range(len(ids))]
    return np.array(names, np.int32), ids, choices


def name_by_features(
    rows: Sequence[Trajectory | None], flat: Int32[np.ndarray, " flat"], lengths: Int64[np.ndarray, " K"]
) -> tuple[NDArray[np.int32], TreeImages]:
    """Put a number below 0, one for each feature of each distinct image, in the place of the images' tokens.

    Args:
        flat: the rows concatenated.

    Returns:
        names: int32 [flat]; -1 - f at a token that stands for feature f.
        images: without the features of the tree's tokens.

    Raises:
        DataError: rows with different placeholder tokens, or a row with this token and without images.
    """
    names, ends = flat.copy(), np.cumsum(lengths)
    token = next(row.image_token for row in rows if row is not None and row.images)
    assert token is not None
    first, distinct, seen = [0], list[Image](), dict[tuple[bytes, int], int]()
    for number, (row, end, length) in enumerate(zip(rows, ends.tolist(), lengths.tolist())):
        ids = flat[end - length : end]
        if row is None or not row.images:
            if (ids == token).any():
                raise DataError(
                    f"row {number} has the token {token}, which stands for images in other rows, at position "
                    f"{int((ids == token).argmax())}, and no images; give its images, or leave the row out"
                )
            continue
        if row.image_token != token:
            raise DataError(
                f"row {number} has image_token {row.image_token}, an earlier row {token}; all rows of a batch are "
                "read by one model"
            )
        for image, places in zip(row.images, *places_of_images([ids], token, row.images)):
            key = image.digest, len(places)
            if key not in seen:
                seen[key] = len(distinct)
                distinct.append(image)
                first.append(first[-1] + key[1])
            begins = first[seen[key]]
            names[end - length + places] = -1 - np.arange(begins, begins + key[1])
    return names, TreeImages(token, distinct, np.array(first, np.int64), np.zeros(0, np.int64))
