"""Experts that were recorded for the tokens of rows while they were sampled.

Tokens with equal ids are merged only if their experts are equal too. So each distinct combination gets a number of its
own, by which rows are merged.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
from jaxtyping import Int16, Int32, Int64, Shaped
from numpy.typing import ArrayLike

from treetrain.core.errors import DataError, shortened
from treetrain.core.tree.token_tree import TokenTree
from treetrain.core.tree.trajectory import Numbered, Trajectory

Experts = Int16[np.ndarray, "N layers k"]


def recorded_experts(tree: TokenTree) -> Experts | None:
    """Recorded experts of each token of a tree, -1 where the router chooses; None if none were recorded."""
    return cast("Experts | None", tree.special.get("experts"))


def expert_array(experts: ArrayLike) -> Shaped[np.ndarray, "L layers k"]:
    """Recorded experts as an array. Raises DataError for anything else than three dimensions."""
    try:
        array = np.asarray(experts)
    except ValueError as error:
        raise DataError(f"experts are no [L, layers, k] block of numbers ({shortened(error)})") from error
    if array.ndim != 3:
        raise DataError(f"experts have shape {array.shape}, expected [L, layers, k]")
    return array


def checked_experts(experts: ArrayLike, length: int) -> Int16[np.ndarray, "L layers k"]:
    """Recorded experts of a row of this many tokens, in an array of their own; raises DataError."""
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


class RecordedExperts:
    """Numbers every distinct pair of a token id and its recorded experts. A `SpecialTokens`."""

    name = "experts"

    def number(
        self, rows: Sequence[Trajectory | None], flat: Int32[np.ndarray, " flat"], lengths: Int64[np.ndarray, " K"]
    ) -> Numbered | None:
        """See `SpecialTokens`; the number of a pair is the first place where it stands.

        Raises:
            DataError: experts whose shape differs from an earlier row's.
        """
        given = [getattr(row, self.name, None) for row in rows]
        if all(experts is None for experts in given):
            return None
        recorded = {k: experts for k, experts in enumerate(given) if experts is not None and len(experts)}
        shapes = {number: experts.shape[1:] for number, experts in recorded.items()}
        first, shape = next(iter(shapes.items()), (0, (0, 0)))
        for number, other in shapes.items():
            if other != shape:
                raise DataError(
                    f"row {number}: experts have {other[0]} layers of {other[1]}, row {first} has {shape[0]} of "
                    f"{shape[1]}; all rows of a batch are routed by one model"
                )
        choices = np.full((len(flat), *shape), -1, np.int16)
        ends = np.cumsum(lengths)
        for number, experts in recorded.items():
            choices[ends[number] - len(experts) : ends[number]] = experts
        pairs = np.concatenate([flat.view(np.int16).reshape(-1, 2), choices.reshape(len(flat), -1)], axis=1)
        blob, width = pairs.tobytes(), 2 * pairs.shape[1]
        del pairs  # as large as the recorded experts
        seen: dict[bytes, int] = {}
        names = [seen.setdefault(blob[width * at : width * (at + 1)], at) for at in range(len(flat))]
        return Numbered(np.array(names, np.int32), lambda numbers: (flat[numbers], choices[numbers]))


def without_fill(experts: Shaped[np.ndarray, "L P k"], name: str, instead: str) -> Int64[np.ndarray, "L P k"]:
    """Recorded experts with -1 where none were recorded: there the model's router chooses.

    A record may be shorter than its row, miss tokens, or hold -1 (255 once it has become 8 bits without a sign). The k
    experts of a token differ, so equal numbers are not a record, and a tail of zeros is not expert 0. With k = 1, 0 and
    255 in 8 bits may be either, and are refused.

    Args:
        name: of the record, for the error.
        instead: says how to do without it.

    Raises:
        DataError: no whole numbers, one below -1, or one expert per token that may be no record.
    """
    if experts.size and experts.dtype.kind not in "iu":
        raise DataError(f"{name} is of type {experts.dtype}, expected whole numbers; {instead}")
    wide = experts.astype(np.int64)
    fill = (wide == 0) | ((wide == 255) & (experts.dtype == np.uint8))
    for wrong, why in (
        (wide < -1, "experts are numbered from 0, and -1 stands for none"),
        (fill & (experts.shape[-1] < 2), "with one expert per token, that may be an expert or stand for no record"),
    ):
        if wrong.any():
            token, layer, of = np.argwhere(wrong)[0].tolist()
            raise DataError(f"{name}: token {token} has {wide[token, layer, of]} in layer {layer}: {why}; {instead}")
    ordered = np.sort(wide, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1, keepdims=True)
    return np.where(twice | (wide < 0).any(-1, keepdims=True), -1, wide)
