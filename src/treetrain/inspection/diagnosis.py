"""Does a chat template keep prefixes, so that the calls of a conversation can share them?"""

import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any

from treetrain.data.trajectory import Trajectory, common_prefix
from treetrain.errors import quoted

CONTEXT = 4  # tokens shown before the first difference
SHOWN = 12  # tokens shown from that difference on


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrefixBreak:
    """The first call that does not extend the call before it."""

    previous: Hashable
    """id of the earlier row."""
    call: Hashable
    """id of the later row."""
    position: int
    """First token (from 0) in which they differ."""
    previous_text: str
    """The earlier row around that token; token ids if no tokenizer was given."""
    call_text: str
    """The later row around that token."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrefixReport:
    """How often a call extends the call before it in the same conversation."""

    calls: int
    """Rows that are calls of a conversation."""
    successive: int
    """Pairs of a call and the next call of the same conversation."""
    broken: int
    """Pairs in which the later row does not begin with all tokens of the earlier one."""
    example: PrefixBreak | None
    """The first broken pair."""

    def explain(self) -> str:
        """The result in words, with what to do about it."""
        if self.successive == 0:
            return "No conversation has two calls: nothing to say about prefixes."
        if self.example is None:
            return f"All {self.successive:,} successive calls extend the call before them: prefixes are kept."
        first = self.example
        return (
            f"{self.broken:,} of {self.successive:,} successive calls do not extend the call before them.\n"
            f"First: {quoted(first.call)} differs from {quoted(first.previous)} at token {first.position}:\n"
            f"  earlier call: {first.previous_text!r}\n"
            f"  later call:   {first.call_text!r}\n"
            "If the policy really saw these prompts, train on them as they are. Otherwise use a template "
            "that writes a message the same way whatever follows it: --chat-template chatml."
        )


def diagnose_prefixes(trajectories: Iterable[Trajectory], tokenizer: Any = None) -> PrefixReport:
    """Compare every call with the call before it in the same conversation, token by token.

    Args:
        trajectories: rows in the calls view, each conversation's calls in order; rows without an `episode` are ignored.
        tokenizer: anything with `decode`; the example then shows text instead of ids.
    """
    last: dict[Hashable, Trajectory] = {}
    calls = successive = broken = 0
    example = None
    for call in trajectories:
        if call.episode is None:
            continue
        calls += 1
        previous = last.get((call.group, call.episode))
        last[(call.group, call.episode)] = call
        if previous is None:
            continue
        successive += 1
        position = common_prefix(previous.ids, call.ids)
        if position == len(previous):
            continue
        broken += 1
        if example is None:
            shown = [row.ids[max(0, position - CONTEXT) : position + SHOWN].tolist() for row in (previous, call)]
            texts = [" ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids) for ids in shown]
            example = PrefixBreak(
                previous=previous.id, call=call.id, position=position, previous_text=texts[0], call_text=texts[1]
            )
    return PrefixReport(calls=calls, successive=successive, broken=broken, example=example)
