"""Losses: their protocol, and the facts that a batch has for them."""
