"""Runs a plan on a model: edges to log-probabilities, losses to gradients."""
