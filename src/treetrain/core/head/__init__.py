"""The language-model head, in chunks."""
