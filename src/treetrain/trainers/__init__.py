"""Shared prefixes inside the trainers people use."""
