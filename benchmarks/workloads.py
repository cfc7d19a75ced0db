"""The fixed works and the model of the CPU benchmarks: trees of real data, of 2,000 to 16,000 flat tokens each.

Rows have the shapes of benchmarks/shapes and random tokens, so nothing is needed beside this repository.
"""

import os
from pathlib import Path

import treetrain as tt
from tree_shapes import load, rows_of

DATA = Path(os.environ.get("TREETRAIN_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
"""Real trajectories with their texts, for the benchmarks of readers and of inspection."""
VOCAB = 16_384
"""Compact, so that the head has its usual share of a model's FLOPs."""
WORKLOADS = {
    "search trees": ("tot_game24", 148),
    "sampled answers": ("codet_humaneval", 48),
    "tool agent, think blocks dropped": ("tau_airline_think_48", 9),
    "tool agent, calls extend calls": ("tau_airline_calls_48", 9),
    "nothing shared (control)": ("unrelated", 16),
}
"""A shape, and how many of its rows: leaves of search trees, answers to a prompt, calls of two conversations.

Of the calls that extend calls, 7 of 9 are prefixes of others, which need no tree to be trained once. Of the sampled
answers 13 repeat another one."""


def load_workload(name: str) -> list[tt.Trajectory]:
    """The rows of a work."""
    return shaped(*WORKLOADS[name])


def shaped(shape: str, rows: int | None = None) -> list[tt.Trajectory]:
    """The first rows of a shape; all of them without a number."""
    return rows_of(load(shape)[:rows], VOCAB)


def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DATA / "tokenizer-qwen3")


def model_30m(seed: int = 0):
    """A Qwen3-shaped model of 30.4M parameters (6.3M of them the tied embedding), float32."""
    return qwen3_model(layers=14, vocab_size=VOCAB, seed=seed)


def qwen3_model(*, layers: int, vocab_size: int, seed: int = 0):
    """A Qwen3-shaped model of 1.7M parameters a layer and a tied embedding, float32, with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)
