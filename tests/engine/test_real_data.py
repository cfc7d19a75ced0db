"""Gradients on samples of all the real data at hand: float32, against the rows computed by themselves."""

import json

import numpy as np
import pytest
import torch

import treetrain as tt
from support import linear
from support.models import make_model

CHAT = ["tau_airline", "tot_game24_bfs"]


@pytest.fixture(scope="module")
def tokenizer(shared_data):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(shared_data / "tokenizer-qwen3")


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    return make_model(
        "qwen3", vocab_size=len(tokenizer), hidden_size=32, tie_word_embeddings=True, max_position_embeddings=20_000
    )


def tau_airline(shared_data, tokenizer) -> list[tt.Trajectory]:
    """Every LLM call of two conversations as a row, cut to 100 tokens behind a common head of 60."""
    folder = shared_data / "tau_airline"
    file = folder / "trajectories.jsonl"
    rows = tt.load(
        file, tokenizer=tokenizer, view="calls", tools=folder / "tools.json", chat_template="chatml", limit=2
    ).trajectories
    # Whole policies and tools are thousands of tokens that train nothing; what follows them is kept.
    shared = min(len(row) - 1 for row in rows)
    start = max(0, shared - 60)
    return [cut(row, start, start + 160) for row in rows][:10]


def tot_game24_bfs(shared_data, tokenizer) -> list[tt.Trajectory]:
    """The first leaves of one puzzle's search tree."""
    file = shared_data / "tot_game24_bfs" / "trajectories.jsonl"
    return tt.load(file, tokenizer=tokenizer, chat_template="chatml", limit=14).trajectories


def codet_humaneval100(shared_data, tokenizer) -> list[tt.Trajectory]:
    """One prompt with some of its samples, duplicates included, as rows of ids."""
    with open(shared_data / "codet_humaneval100" / "upstream.jsonl") as lines:
        problem = json.loads(next(lines))
    prompt = tokenizer(problem["prompt"])["input_ids"]
    rows = []
    for number, sample in enumerate(problem["samples"][:8]):
        ids = [*prompt, *tokenizer(sample)["input_ids"][:40]]
        weights = np.arange(len(ids)) >= len(prompt)
        rows.append(tt.Trajectory(ids, loss_weights=weights, reward=float(number % 3 == 0), group=0))
    return rows


def cut(row: tt.Trajectory, start: int, stop: int) -> tt.Trajectory:
    return tt.Trajectory(row.ids[start:stop], loss_weights=row.weights[start:stop], reward=row.reward, group=row.group)


SETS = {"tau_airline": tau_airline, "tot_game24_bfs": tot_game24_bfs, "codet_humaneval100": codet_humaneval100}


@pytest.mark.parametrize("name", SETS)
def test_gradients_on_real_trajectories_are_those_of_the_rows(name, shared_data, tokenizer, model, record_property):
    rows = SETS[name](shared_data, tokenizer)
    tree = tt.build_tree(rows)
    assert tree.num_tokens < 0.7 * tree.num_flat_tokens, "this sample shares nothing"
    assert sum(row.weights.sum() for row in rows) > 50
    scores = linear.score_rows(model, [row.ids.tolist() for row in rows])
    rng = np.random.default_rng(0)
    rows = [
        row.replace(
            advantages=float(rng.normal()),
            # Ratios around 1, some beyond the bounds.
            old_logprobs=np.concatenate([[0.0], logp.detach().numpy() + rng.normal(0, 0.15, len(logp))]),
        )
        for row, logp in zip(rows, scores[0])
    ]
    entropy = 0.01
    cases = {
        "sft": (tt.losses.sft(), lambda logp, h, facts: -logp),
        "ppo": (
            tt.losses.ppo(clip=0.2, entropy=entropy),
            lambda logp, h, facts: linear.clipped(logp, facts, 0.2, 0.2) - entropy * h,
        ),
    }
    for case, (loss, per_token) in cases.items():
        total = linear.batch_loss(scores, rows, per_token)
        expected = linear.gradients(model, total, retain_graph=True)
        model.zero_grad()
        result = tt.TreeEngine(model).forward_backward(rows, loss)
        error = linear.relative_error(linear.gradients(model), expected)
        record_property(case, error)
        assert error <= 1e-5
        assert result.loss == pytest.approx(float(total.detach()), rel=1e-5, abs=1e-6)
        assert result.computed_tokens <= tree.num_tokens
