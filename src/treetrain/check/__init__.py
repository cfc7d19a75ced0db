"""Proofs on the user's own model and rows: `verify` (is it exact?) and `bench` (is it faster?)."""
