"""A small environment (arithmetic countdown), agents that play it, and a script that records games."""
