"""The formats of logs, each a function from a record to rows of token ids or messages."""

from treetrain.data.formats.conversations import CHAT, COMPLETION, PREFERENCE, REQUESTS, SHAREGPT
from treetrain.data.records import Format

TOKENS = Format(
    "tokens", "`input_ids`", lambda record: "input_ids" in record, lambda record, notes: [record], tokens=True
)

FORMATS = (TOKENS, PREFERENCE, REQUESTS, CHAT, SHAREGPT, COMPLETION)
"""Tried in this order on the first record."""
