"""What a dense model in one process does not need: one file each, attached by the engine to the calls that need it."""
