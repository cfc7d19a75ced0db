"""Options that a dense model in one process does not need: one file each, attached by the engine to calls that do."""
