"""Training rows: what a trajectory is, how files of them are read and checked. Numpy only."""

from treetrain.data.advantages import group_advantages
from treetrain.data.chat import trajectories_from_chat_row
from treetrain.data.diagnosis import PrefixBreak, PrefixReport, diagnose_prefixes
from treetrain.data.jsonl import read_jsonl
from treetrain.data.load import LoadedFile, load
from treetrain.data.rendering import Renderer, chat_template_text
from treetrain.data.token_rows import trajectory_from_token_row
from treetrain.data.trajectory import Trajectory

__all__ = [
    "LoadedFile",
    "PrefixBreak",
    "PrefixReport",
    "Renderer",
    "Trajectory",
    "chat_template_text",
    "diagnose_prefixes",
    "group_advantages",
    "load",
    "read_jsonl",
    "trajectories_from_chat_row",
    "trajectory_from_token_row",
]
