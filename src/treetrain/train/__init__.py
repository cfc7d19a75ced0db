"""The trainer, and the proofs: verify (exact?) and bench (faster?)."""
