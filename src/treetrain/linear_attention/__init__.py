"""Recurrence along the paths of a tree: causal convolutions, the gated delta rule, and the state that parts hand on."""
