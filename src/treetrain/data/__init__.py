"""Training rows: the trajectory, and reading and checking files of trajectories. Numpy only."""

from treetrain.data.advantages import group_advantages
from treetrain.data.chat import Renderer, chat_template_text
from treetrain.data.load import LoadedFile, from_messages, load
from treetrain.data.records import Format, Notes, ReadSettings
from treetrain.data.trajectory import Trajectory

__all__ = [
    "Format",
    "LoadedFile",
    "Notes",
    "ReadSettings",
    "Renderer",
    "Trajectory",
    "chat_template_text",
    "from_messages",
    "group_advantages",
    "load",
]
