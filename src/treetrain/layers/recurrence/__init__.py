"""Recurrence along the paths of a tree: causal convolutions, the gated delta rule, and the cache of their states."""
