"""Kinds of layers that a dense model lacks: each attaches itself to a call."""
