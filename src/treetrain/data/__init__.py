"""Trajectories and where they come from. Numpy only."""
