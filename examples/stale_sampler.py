"""A mixture of experts trained on answers that a stale sampler in bfloat16 wrote and whose routing it recorded.

    python -m examples.stale_sampler
    python -m examples.stale_sampler --lag 3

A sampler's numerics are not training's, and its weights are some updates old: it chooses other experts for some tokens,
and its log-probabilities are others. Rows carry both. With `experts` training routes every token as the sampler did;
`rollout_logprobs` give the ratio by which a loss corrects each token, within limits. Each step prints KL(sampler,
policy) with and without the recorded experts, and the share of tokens whose ratio is outside the limits.
"""

import argparse
import copy
import random
from collections import deque

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import treetrain as tt
from examples.countdown.agent import RECORDED, TASKS, TEMPLATE, prompt_ids, recorded_puzzle, sample
from examples.countdown.chat import begin, parse_reply


def mixture(vocabulary: int, seed: int) -> Qwen3MoeForCausalLM:
    """Two layers of eight experts, two for each token; random weights."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return Qwen3MoeForCausalLM(config).eval()


@torch.no_grad()
def recorded(sampler: Qwen3MoeForCausalLM, ids: list[int]) -> tuple[np.ndarray, list[float]]:
    """What an inference engine returns beside its tokens: experts [L, layers, k], and log-probabilities [L]."""
    given = torch.tensor([ids])
    out = sampler(input_ids=given, output_router_logits=True, use_cache=False)
    k = sampler.config.num_experts_per_tok
    experts = torch.stack([of_layer.topk(k).indices for of_layer in out.router_logits], 1)
    logprobs = out.logits[0, :-1].float().log_softmax(-1).gather(1, given[0, 1:, None])[:, 0]
    return experts.numpy(), [0.0, *logprobs.tolist()]


def answers(sampler, tokenizer, tasks: list[str]) -> list[tt.Trajectory]:
    """One sampled answer to each task's first prompt, rewarded for a short call of the tool."""
    prompts = [prompt_ids(tokenizer, begin(recorded_puzzle(task))) for task in tasks]
    rows = []
    for task, prompt, reply in zip(tasks, prompts, sample(sampler, tokenizer, prompts)):
        experts, logprobs = recorded(sampler, [*prompt, *reply])
        readable = parse_reply(tokenizer.decode(reply, skip_special_tokens=True)) is not None
        rows.append(
            tt.Trajectory(
                [*prompt, *reply],
                loss_weights=[0.0] * len(prompt) + [1.0] * len(reply),
                rollout_logprobs=logprobs,
                experts=experts,
                reward=readable - len(reply) / 100,
                group=task,
            )
        )
    return rows


def mismatch(engine: tt.TreeEngine, rows: list[tt.Trajectory]) -> float:
    """KL(sampler, policy) over the sampled tokens, in nats, by the estimator k3."""
    pairs = [
        (x.double()[row.weights[1:] > 0], torch.tensor(row.rollout_logprobs[1:])[row.weights[1:] > 0])
        for row, x in zip(rows, engine.logprobs(rows))
    ]
    log_ratio = torch.cat([ours - theirs for ours, theirs in pairs])
    return (log_ratio.expm1() - log_ratio).mean().item()


def main(
    steps: int = 8, lag: int = 1, answers_per_task: int = 6, warm_steps: int = 40, lr: float = 3e-4, seed: int = 0
) -> list[dict[str, float]]:
    """Train by imitation first, then from sampled answers; returns a record of every step.

    Args:
        lag: updates by which the sampler's weights are behind.
    """
    tokenizer = tt.load_tokenizer("tiny")
    model = mixture(2048, seed)
    engine = tt.TreeEngine(model)
    games = tt.load(RECORDED, tokenizer=tokenizer, chat_template=TEMPLATE, tools="none").trajectories
    games, drawn = [game for game in games if game.group in TASKS], random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    imitation = tt.losses.sft()
    for _ in range(warm_steps):
        engine.forward_backward(drawn.sample(games, 6), imitation)
        optimizer.step()
        optimizer.zero_grad()

    loss_fn = tt.losses.grpo(clip_low=0.2, clip_high=0.28, importance_cap=2.0, importance_floor=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    versions = deque([copy.deepcopy(model).bfloat16()], maxlen=lag + 1)  # of the sampler, the oldest first
    torch.manual_seed(seed)
    history = []
    for step in range(steps):
        rows = tt.group_advantages(answers(versions[0], tokenizer, [t for t in TASKS for _ in range(answers_per_task)]))
        old = engine.logprobs(rows)
        rows = [row.replace(old_logprobs=[0.0, *scores.tolist()]) for row, scores in zip(rows, old)]
        record = {"kl": mismatch(engine, rows), "kl_own": mismatch(engine, [r.replace(experts=None) for r in rows])}
        result = engine.forward_backward(rows, loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        versions.append(copy.deepcopy(model).bfloat16())
        outside = result.metrics["importance_capped"] + result.metrics["importance_floored"]
        record |= {"outside": outside, "reward": sum(row.reward for row in rows) / len(rows)}
        history.append(record)
        print(
            f"step {step}: reward {record['reward']:.2f}, KL from the sampler {record['kl']:.1e} with its experts, "
            f"{record['kl_own']:.1e} with the policy's own; {outside:.1%} of tokens beyond a limit; "
            f"{result.computed_tokens} of {result.flat_tokens} tokens computed"
        )
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A mixture of experts and a stale sampler.")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lag", type=int, default=1, help="updates by which the sampler is behind")
    parser.add_argument("--answers-per-task", type=int, default=6)
    parser.add_argument("--warm-steps", type=int, default=40, help="of imitation of recorded games")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
