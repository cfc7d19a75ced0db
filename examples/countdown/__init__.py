"""A small real environment (arithmetic countdown), agents that play it, and the recorder of its data."""
