"""The formats of logs, each a function from a record to rows of token ids or messages."""

from treetrain.data.formats.agents import (
    AREAL,
    ART,
    INSPECT,
    MINI_SWE_AGENT,
    SWE_AGENT,
    TAU,
    THOUGHTS,
    TOOLBENCH,
    VERL,
)
from treetrain.data.formats.conversations import BATCH, CHAT, COMPLETION, PREFERENCE, REQUESTS, SHAREGPT
from treetrain.data.formats.events import ATIF, CLAUDE_CODE, CODEX, MESSAGES, OPENHANDS, OPENHANDS_EVENTS
from treetrain.data.formats.nodes import NODES
from treetrain.data.formats.tokens import SERVER, STEPS, TOKENS
from treetrain.data.formats.traces import AGENTS_SDK, BRAINTRUST, LANGFUSE, LANGSMITH, OPIK, SPANS, WEAVE

FORMATS = (
    *(VERL, TOKENS, NODES, SERVER, STEPS, ART, AREAL, SWE_AGENT, MINI_SWE_AGENT, TAU, INSPECT, TOOLBENCH, THOUGHTS),
    *(CLAUDE_CODE, CODEX, OPENHANDS, OPENHANDS_EVENTS, ATIF, SPANS, LANGSMITH, BRAINTRUST, WEAVE, OPIK, AGENTS_SDK),
    *(LANGFUSE, BATCH, PREFERENCE, REQUESTS, CHAT, SHAREGPT, COMPLETION, MESSAGES),
)
"""Tried in this order on the first record."""
