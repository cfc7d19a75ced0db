"""Training rows: the trajectory, and reading and checking files of trajectories. Numpy only."""

from treetrain.data.advantages import group_advantages
from treetrain.data.chat import CHAT, Renderer, chat_template_text
from treetrain.data.load import LoadedFile, load
from treetrain.data.records import Format, Notes, ReadSettings, read_jsonl
from treetrain.data.token_rows import TOKENS
from treetrain.data.trajectory import Trajectory

__all__ = [
    "CHAT",
    "TOKENS",
    "Format",
    "LoadedFile",
    "Notes",
    "ReadSettings",
    "Renderer",
    "Trajectory",
    "chat_template_text",
    "group_advantages",
    "load",
    "read_jsonl",
]
