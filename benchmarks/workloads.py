"""The fixed tasks and the model of the CPU benchmarks: trees of real data, of about 30,000 flat tokens each.

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
    "tau_airline_think": "tau_airline_think_48",
    "tau_airline_calls": "tau_airline_calls_48",
    "tot_game24": "tot_game24",
    "codet_humaneval": "codet_humaneval",
    "unrelated": "unrelated",
}
"""The shape of each task.

Calls of a tool agent in four trials of a task, by a template that drops earlier think blocks and by one that keeps
prefixes; all leaves of six search trees; 100 samples of each of two prompts; the first sample of each of 164 prompts,
which share nothing: the control.
"""


def load_workload(name: str) -> list[tt.Trajectory]:
    """The rows of a task."""
    return rows_of(load(WORKLOADS[name]), VOCAB)


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
