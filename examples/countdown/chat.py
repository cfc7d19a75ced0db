"""Episodes as chat transcripts: OpenAI-style messages around the environment's states."""

import json
import re
from dataclasses import dataclass
from typing import Any

from examples.countdown.environment import SYSTEM_PROMPT, Puzzle, State, call, listed, start

Message = dict[str, Any]

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of an agent: its text (None: no text) and the tool it calls, `arguments` as JSON text."""

    content: str | None
    name: str
    arguments: str = "{}"


@dataclass(frozen=True, slots=True)
class Episode:
    """A state and the messages that led to it. Immutable, so it can be continued several times."""

    state: State
    messages: tuple[Message, ...]

    def after(self, reply: Reply) -> "Episode":
        """The episode one turn later: the agent's message and the tool's answer appended."""
        state, answer = call(self.state, reply.name, reply.arguments)
        call_id = f"call_{state.calls}"
        function = {"name": reply.name, "arguments": reply.arguments}
        tool_calls = [{"id": call_id, "type": "function", "function": function}]
        agent = {"role": "assistant", "content": reply.content, "tool_calls": tool_calls}
        tool = {"role": "tool", "tool_call_id": call_id, "content": answer}
        return Episode(state, (*self.messages, agent, tool))


def begin(puzzle: Puzzle) -> Episode:
    """The episode before the agent's first turn: rules and task."""
    task = f"Numbers: {listed(puzzle.numbers)}. Target: {puzzle.target}."
    messages = ({"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": task})
    return Episode(start(puzzle), messages)


def parse_reply(text: str) -> Reply | None:
    """Read what a model wrote in the form of the shipped chat template.

    The first tool call counts; the text before it is the content. Returns None if no call can be parsed.
    """
    match = _TOOL_CALL.search(text)
    if match is None:
        return None
    try:
        function = json.loads(match[1])
        name, arguments = function["name"], function.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str):
        return None
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return Reply(text[: match.start()].strip() or None, name, arguments)
