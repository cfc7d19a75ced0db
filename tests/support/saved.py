"""A small model saved to a folder, as the command line and the trainer take it."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def save_small_model(folder: Path, *, vocabulary: int, positions: int) -> str:
    """Save a two-layer Qwen3 of random weights, the same ones every time; returns the folder."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)
