"""The program of `make demo`: the same training as a tree and linearly, side by side."""
