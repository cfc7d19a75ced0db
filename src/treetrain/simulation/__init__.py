"""Predicts a training step over many ranks, without starting any."""
