"""treetrain: train LLMs on branching agent trajectories, every shared prefix computed once, gradients exact."""

__version__ = "0.1.0"
