"""Reads from a model's own mask how far each of its layers sees, instead of building the mask.

A model makes its masks by transformers' functions, which hand a *mask function*, put together from a few known ones, to
whoever is registered for the attention implementation. Under ours it is taken apart: what comes out travels to the
layers in place of the mask (`SightMask`). Anything in it that is not known is refused, so a layer is never given a
wider or a narrower view than the model's own.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from transformers.masking_utils import AttentionMaskInterface

from treetrain.errors import UnsupportedModel
from treetrain.tree.attention_range import AttentionRange

_COMBINATIONS = {"and_masks.<locals>.and_mask", "remap_positions_for_packed_sequence.<locals>.inner_mask"}
# What a tree's own rule says already: causal, and nothing of one row in another.
_IMPLIED = {"causal_mask_function", "packed_sequence_mask_function.<locals>.inner_mask"}
_WINDOW = "sliding_window_overlay.<locals>.inner_mask"
_CHUNK = "chunked_overlay.<locals>.inner_mask"


class SightMask:
    """Stands for a mask. Layers hand it on; one that computes with it is refused."""

    def __init__(self, sight: AttentionRange):
        self.sight = sight

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"reads .{name} of it")

    def __getitem__(self, _key: Any) -> NoReturn:
        self._refuse("takes a part of it")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedModel(
            f"the model computes with its attention mask, {self.sight} (it {what}): what its layers see is not known."
        )


class EmptyMask:
    """Stands for the mask of a window of 0 tokens, which Qwen2-MoE makes beside the one its layers take."""

    @property
    def sight(self) -> NoReturn:
        raise UnsupportedModel("a layer takes an attention mask whose window is 0, so that no token sees any.")


def windowless(name: str, error: ValueError) -> UnsupportedModel | None:
    """The refusal of a model whose masks need a window that its configuration has not; None for another error.

    Args:
        name: of the model's class.
        error: of its forward.
    """
    if "`sliding_window`" not in str(error):
        return None
    return UnsupportedModel(
        f"{name} makes the mask of a window, but its configuration has sliding_window=None, so it runs on no row "
        f"either ({error}); give it a window (as long as the longest row for none)."
    )


def sight_of(mask_function: Callable) -> AttentionRange | EmptyMask | None:
    """How far a mask function lets a token see; None for everything above it.

    Raises:
        UnsupportedModel: the mask is something else than causal, a window or chunks; naming what.
    """
    sights = []
    for function in _leaves(mask_function):
        name = function.__qualname__
        known = function.__module__ == "transformers.masking_utils"
        if known and name in _IMPLIED:
            continue
        size = inspect.getclosurevars(function).nonlocals
        if known and name == _WINDOW:
            if not size["sliding_window"]:
                return EmptyMask()
            sights.append(AttentionRange(window=int(size["sliding_window"])))
        elif known and name == _CHUNK:
            sights.append(AttentionRange(chunk=int(size["chunk_size"])))
        else:
            raise UnsupportedModel(f"the model's attention mask has a part that is not known here: {name}.")
    if len(sights) > 1:
        raise UnsupportedModel(f"the model's attention mask has several bounds at once: {', '.join(map(str, sights))}.")
    return sights[0] if sights else None


def _leaves(function: Callable) -> Iterator[Callable]:
    """The mask functions that one is put together from."""
    if function.__qualname__ not in _COMBINATIONS:
        yield function
        return
    for value in inspect.getclosurevars(function).nonlocals.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if callable(part):
                yield from _leaves(part)


def _tree_mask(*args: Any, mask_function: Callable, **kwargs: Any) -> SightMask | EmptyMask | None:
    sight = sight_of(mask_function)
    return SightMask(sight) if isinstance(sight, AttentionRange) else sight


def register_tree_masks(interface: str) -> None:
    """Be asked for the masks of models whose attention goes through `interface`."""
    AttentionMaskInterface.register(interface, _tree_mask)
