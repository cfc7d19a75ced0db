"""Checks which models can run on a tree, loads them, and switches them to tree attention during a call."""
