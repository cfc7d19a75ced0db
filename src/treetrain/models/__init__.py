"""Which models can be run on a tree, and how they are switched to tree attention for the length of a call."""
