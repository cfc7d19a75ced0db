"""The formats of logs, each a function from a record to rows of token ids or messages."""

from treetrain.data.formats.agents import AREAL, ART, INSPECT, SWE_AGENT, TAU, THOUGHTS, TOOLBENCH, VERL
from treetrain.data.formats.conversations import CHAT, COMPLETION, PREFERENCE, REQUESTS, SHAREGPT
from treetrain.data.formats.nodes import NODES
from treetrain.data.formats.tokens import SERVER, STEPS, TOKENS
from treetrain.data.formats.traces import LANGFUSE, LANGSMITH, SPANS

FORMATS = (
    *(TOKENS, NODES, SERVER, STEPS, VERL, ART, AREAL, SWE_AGENT, TAU, INSPECT, TOOLBENCH, THOUGHTS),
    *(SPANS, LANGSMITH, LANGFUSE, PREFERENCE, REQUESTS, CHAT, SHAREGPT, COMPLETION),
)
"""Tried in this order on the first record."""
