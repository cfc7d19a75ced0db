"""Training rows: the trajectory, and reading and checking files of trajectories. Numpy only.

Loads nothing: a training step needs `trajectory` and `columns`, and only `load` the readers of logs.
"""
