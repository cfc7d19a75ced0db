"""Training rows: what a trajectory is, and how files of them are read."""

from treetrain.data.trajectory import Trajectory

__all__ = ["Trajectory"]
