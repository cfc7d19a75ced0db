"""Images: encoders, and their tokens in a tree."""
