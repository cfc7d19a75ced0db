"""Tree attention: its backends, the choice between them, the KV cache and a reference for the tests."""
