"""The fixed tasks and the model of the CPU benchmarks: real data of about 30,000 flat tokens each."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

import treetrain as tt

DATA = Path(os.environ.get("TREETRAIN_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
VOCAB = 16_384
"""Token ids are renumbered to this compact vocabulary, so that the head has its usual share of a model's FLOPs.

The tree of a batch does not depend on which numbers its tokens have."""


def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DATA / "tokenizer-qwen3")


def tau_airline_calls() -> list[tt.Trajectory]:
    """All four trials of task 48, one row per LLM call; completions trained."""
    loaded = tt.load(
        DATA / "tau_airline" / "trajectories.jsonl", tokenizer=tokenizer(), view="calls", chat_template="chatml"
    )
    return [row for row in loaded.trajectories if row.group == "48"]


def tot_game24() -> list[tt.Trajectory]:
    """All leaves of the search trees of puzzles 900 to 905; assistant text trained."""
    path = DATA / "tot_game24_bfs" / "trajectories.jsonl"
    wanted = {f"game24-{number}" for number in range(900, 906)}
    loaded = tt.load(path, tokenizer=tokenizer(), chat_template="chatml", limit=600)
    return [row for row in loaded.trajectories if row.group in wanted]


def codet_humaneval() -> list[tt.Trajectory]:
    """All samples of prompts 2 and 9; samples trained."""
    return [row for number in (2, 9) for row in _codet_rows(number)]


def unrelated() -> list[tt.Trajectory]:
    """The first sample of each of the 164 prompts: overlap near 0, the control."""
    return [_codet_rows(number)[0] for number in range(164)]


WORKLOADS: dict[str, Callable[[], list[tt.Trajectory]]] = {
    "tau_airline_calls": tau_airline_calls,
    "tot_game24": tot_game24,
    "codet_humaneval": codet_humaneval,
    "unrelated": unrelated,
}


def load_workload(name: str) -> list[tt.Trajectory]:
    """The rows of a task, with ids renumbered to the compact vocabulary."""
    rows = WORKLOADS[name]()
    distinct = np.unique(np.concatenate([row.ids for row in rows]))
    assert len(distinct) <= VOCAB
    return [row.replace(ids=np.searchsorted(distinct, row.ids).astype(np.int32)) for row in rows]


_LINES: list[str] = []
_TOKENIZER: list = []


def _codet_rows(number: int) -> list[tt.Trajectory]:
    if not _LINES:
        _LINES.extend((DATA / "codet_humaneval100" / "upstream.jsonl").read_text().splitlines())
        _TOKENIZER.append(tokenizer())
    entry, encode = json.loads(_LINES[number]), _TOKENIZER[0]
    prompt = encode(entry["prompt"])["input_ids"]
    rows = []
    for k, sample in enumerate(entry["samples"]):
        answer = encode(sample)["input_ids"]
        weights = [0.0] * len(prompt) + [1.0] * len(answer)
        rows.append(tt.Trajectory(prompt + answer, loss_weights=weights, group=number, id=f"{number}/{k}"))
    return rows


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
