"""A dense Hugging Face model in one process: rows to a tree, a plan, passes, gradients. Imports nothing outside."""
