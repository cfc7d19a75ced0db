"""Hugging Face models: what they can do, and the switch into tree mode."""
