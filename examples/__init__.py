"""Programs that use treetrain; run from the repository root, e.g. `python -m examples.countdown.record`."""
