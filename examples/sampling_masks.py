"""Policy updates on answers that were sampled with top-p: rows record the ids that the sampler kept.

    python -m examples.sampling_masks --top-p 0.8

A sampler with top-p draws from a few ids, and its log-probabilities are those among them. Without the kept ids a
trainer would score another distribution. Rewards are for answers that call the tool, in few tokens.
"""

import argparse

import torch

import treetrain as tt
from examples import sft
from examples.countdown.agent import REPLY_TOKENS, TASKS, prompt_ids, recorded_puzzle
from examples.countdown.chat import begin, parse_reply


@torch.no_grad()
def answers(model, tokenizer, prompt: list[int], count: int, top_p: float, group: str) -> list[tt.Trajectory]:
    """Sample rows of one prompt, each with the kept ids of every token and its log-probability among them."""
    written = model.generate(
        input_ids=torch.tensor([prompt] * count),
        attention_mask=torch.ones(count, len(prompt), dtype=torch.long),
        max_new_tokens=REPLY_TOKENS,
        do_sample=True,
        top_k=0,
        top_p=top_p,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        output_scores=True,  # the logits after top-p: -inf for ids that were not kept
        return_dict_in_generate=True,
    )
    scores, rows = torch.stack(written.scores, 1).log_softmax(-1), []  # [count, tokens, V]
    for ids, of_row in zip(written.sequences[:, len(prompt) :].tolist(), scores):
        reply = ids[: ids.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in ids else ids
        kept = [step.isfinite().nonzero()[:, 0].tolist() for step in of_row[: len(reply)]]
        readable = parse_reply(tokenizer.decode(reply, skip_special_tokens=True)) is not None
        rows.append(
            tt.Trajectory(
                [*prompt, *reply],
                loss_weights=[0.0] * len(prompt) + [1.0] * len(reply),
                old_logprobs=[0.0] * len(prompt) + [of_row[at, id].item() for at, id in enumerate(reply)],
                sampling_mask=[None] * len(prompt) + kept,
                reward=readable - len(reply) / REPLY_TOKENS,
                group=group,
            )
        )
    return rows


def gap(engine: tt.TreeEngine, rows: list[tt.Trajectory]) -> float:
    """Mean distance of the engine's log-probabilities from the sampler's, over sampled tokens, in nats."""
    scored = zip(rows, engine.logprobs(rows))
    apart = [(x.double() - torch.tensor(row.old_logprobs[1:]))[row.weights[1:] > 0].abs() for row, x in scored]
    return torch.cat(apart).mean().item()


def main(
    steps: int = 10, count: int = 8, top_p: float = 0.8, warm_steps: int = 20, lr: float = 1e-4, seed: int = 0
) -> list[dict[str, float]]:
    """Sample and update; returns a record of every step.

    Args:
        count: answers to each task's first prompt in a step.
    """
    tokenizer, (model, _) = tt.load_tokenizer("tiny"), sft.main(steps=warm_steps, seed=seed)
    engine, loss_fn = tt.TreeEngine(model), tt.losses.grpo(clip_low=0.2, clip_high=0.28)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    prompts = {task: prompt_ids(tokenizer, begin(recorded_puzzle(task))) for task in TASKS}
    torch.manual_seed(seed)

    history = []
    for step in range(steps):
        drawn = [row for task in TASKS for row in answers(model, tokenizer, prompts[task], count, top_p, task)]
        rows = tt.group_advantages(drawn)
        record = {
            "reward": sum(row.reward for row in rows) / len(rows),
            "gap": gap(engine, rows),
            "gap without masks": gap(engine, [row.replace(sampling_mask=None) for row in rows]),
        }
        result = engine.forward_backward(rows, loss_fn)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append(record | {"ratio": result.metrics["ratio"]})
        print(
            f"step {step}: reward {record['reward']:.2f}, distance from the sampler {record['gap']:.1e} nats, without "
            f"masks {record['gap without masks']:.1e}; {result.computed_tokens} of {result.flat_tokens} tokens computed"
        )
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Policy updates on answers that were sampled with top-p.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--count", type=int, default=8, help="answers to each prompt in a step")
    parser.add_argument("--top-p", type=float, default=0.8)
    parser.add_argument("--warm-steps", type=int, default=20, help="of supervised fine-tuning")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
