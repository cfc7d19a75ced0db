"""The tool schemas in a prompt, found in its tokens, and the same tools brought into one order.

Sorting the tools and their keys before a prompt is rendered is a change of each row by itself. So it is repaired by
itself: every row's tools are put in the order in which they appear first, each as it is written first. What still
differs afterwards is another set of tools.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from treetrain.logs.inspection.alignment import Ids

TOOL = re.compile(r'"(?:parameters|properties|description|function|input_schema)"')
"""The contents of a tool's schema."""
BETWEEN = 8
"""Most characters between two tools of a list."""


class Tools(NamedTuple):
    """The tools of a prompt."""

    start: int
    """The first token of the first tool."""
    names: tuple[str, ...]
    """Each tool's schema with its keys in order."""
    pieces: tuple[Ids, ...]
    """Each tool's tokens, up to the next tool."""

    @property
    def stop(self) -> int:
        """One past the last token of the last tool."""
        return self.start + sum(len(piece) for piece in self.pieces)


def find_tools(ids: Ids, text_of: Callable[[int], str]) -> Tools | None:
    """Find the tools of a prompt, one after the other, each a JSON object.

    Args:
        ids: the tokens of a system prompt, int32 [L].
        text_of: the text of one token.
    """
    words = [text_of(token) for token in ids.tolist()]
    text = "".join(words)
    found: list[tuple[str, int, int]] = []
    for tool in _objects(text) if TOOL.search(text) else ():
        if found and tool[1] - found[-1][2] > BETWEEN:
            if len(found) > 1:
                break
            found = []
        found.append(tool)
    if not found:
        return None
    begins = np.array([0, *accumulate(map(len, words))])
    cuts = [int(np.searchsorted(begins, first, side="right")) - 1 for _, first, _ in found]
    cuts.append(int(np.searchsorted(begins, found[-1][2] - 1, side="right")))
    pieces = tuple(ids[first:last] for first, last in pairwise(cuts))
    return Tools(cuts[0], tuple(name for name, _, _ in found), pieces)


def _objects(text: str) -> Iterator[tuple[str, int, int]]:
    """(the schema with its keys in order, first character, one past the last) of every tool in a text."""
    decode, at = json.JSONDecoder().raw_decode, text.find("{")
    while at >= 0:
        stop = at + 1
        try:
            value, end = decode(text, at)
        except (ValueError, RecursionError):
            pass
        else:
            inner = value.get("function", value)
            if isinstance(inner, dict) and "name" in inner and len(inner) > 1:
                yield json.dumps(value, sort_keys=True), at, end
                stop = end
        at = text.find("{", stop)


class ToolOrder:
    """One order of the tools of many prompts, and one way in which each is written, as seen first.

    The order is that of the prompts if one order fits all of them, else alphabetical.
    """

    def __init__(self, prompts: Iterable[Tools]) -> None:
        rank: dict[str, int] = {}
        self._written: dict[tuple[str, bool], Ids] = {}
        known = sorted(prompts, key=lambda tools: -len(tools.names))  # so that a missing tool changes no order
        for tools in known:
            for number, (name, piece) in enumerate(zip(tools.names, tools.pieces), 1):
                rank.setdefault(name, len(rank))
                self._written.setdefault((name, number == len(tools.names)), piece)
        fits = all(rank[one] < rank[other] for tools in known for one, other in pairwise(tools.names))
        self._key = rank.__getitem__ if fits else lambda schema: (called(schema), schema)

    def sorted(self, tools: Tools) -> Ids:
        """The tokens of these tools in order."""
        *others, last = sorted(tools.names, key=self._key)
        asked = [*((name, False) for name in others), (last, True)]  # the last one ends the list: written otherwise
        written = self._written
        return np.concatenate(
            [written[name, end] if (name, end) in written else written[name, not end] for name, end in asked]
        )


def called(schema: str) -> str:
    """The name of a tool."""
    value = json.loads(schema)
    return str(value.get("function", value).get("name"))
