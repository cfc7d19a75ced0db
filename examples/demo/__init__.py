"""What `make demo` runs: the same training as a tree and linearly, side by side."""
