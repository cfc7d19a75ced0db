"""vLLM samples, agents play, treetrain trains, and the weights go back to vLLM: GRPO in one process, on CPUs.

    make live                                    # an environment with vLLM, then the next line
    python -m examples.live.train --check-rows 3

SmolLM2-135M-Instruct is shown a few demonstrations and then learns from rewards for right answers. The trainer computes
in float32 and the sampler in bfloat16: the loss weights each token by the ratio of their probabilities, up to a cap,
and logs how far they are apart. Writes rounds.csv, a line for each round, and rounds.png into runs/live.
"""

import argparse
import copy
import csv
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import treetrain as tt
from examples.calculator.agent import load, load_tokenizer
from examples.calculator.problems import TRAINED, Problem, draw
from examples.live.agent import Agents, Batches, Sampler, demonstration, run_all

OPENINGS, BRANCHES = 2, 2
"""First turns of a problem, and branches of each after its first result: four episodes, whose rewards are compared."""
BUDGET = 8192
"""Tokens whose graph is alive at once. A fixed number, and not what memory is free, so that runs are equal."""
LOSS = tt.losses.ppo(on_policy=True, importance_cap=2.0)
"""One update on what the present weights have sampled: the only ratio left is that of trainer to sampler."""


def warm_start(*, steps: int, seed: int) -> Path:
    """The folder of the model after SFT on demonstrations, three problems a step; made if it is not there."""
    path = Path(f"runs/live/warm-{steps}-{seed}")
    if not (path / "model.safetensors").is_file():
        tokenizer, model, problems = load_tokenizer(), load(), draw(TRAINED, 3 * steps, seed=1000 + seed)
        engine = tt.TreeEngine(model, budget=BUDGET)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
        for step in range(steps):
            shown = problems[3 * step : 3 * step + 3]
            rows = [row for problem in shown for row in demonstration(tokenizer, problem).rows(problem, number=0)]
            result = engine.forward_backward(rows, tt.losses.sft())
            update(model, optimizer)
            print(f"demonstrations {step}: loss {result.loss:.3f}", flush=True)
        tokenizer.save_pretrained(path)
        model.save_pretrained(path)
    return path


def play(sampler: Sampler, tokenizer: Any, problems: Sequence[Problem]) -> list[tt.Trajectory]:
    """Play all episodes of the problems side by side; their rows, with advantages."""
    agents = Agents(tokenizer, Batches(sampler))
    asked = [problem for problem in problems for _ in range(OPENINGS)]
    played = run_all(agents.solve(problem.question, BRANCHES) for problem in asked)
    episodes = [(problem, episode) for problem, found in zip(asked, played) for episode in found]
    rows = [row for number, (problem, episode) in enumerate(episodes) for row in episode.rows(problem, number)]
    return tt.group_advantages(rows)


def rows_one_by_one(model: Any, rows: Sequence[tt.Trajectory], loss: Any) -> float:
    """Loss and gradients of the same step without a tree: a forward and a backward for every row."""
    total, normaliser = 0.0, loss.normaliser(rows)
    for row in rows:
        ids = torch.from_numpy(row.ids).long()
        scores = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        value = loss(scores.gather(1, ids[1:, None])[:, 0], None, row)[0] / normaliser
        value.backward()
        total += value.item()
    return total


def update(model: Any, optimizer: torch.optim.Optimizer) -> float:
    """Make an optimizer step; returns the norm of the gradients."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


def main(
    rounds: int = 20,
    problems: int = 6,
    warm_steps: int = 10,
    lr: float = 2e-5,
    seed: int = 0,
    check_rows: int = 0,
    output: str = "runs/live",
) -> list[dict[str, Any]]:
    """Train; returns a record of every round.

    Args:
        rounds: rounds of playing, one update, and new weights for the sampler.
        problems: problems of a round.
        warm_steps: steps of supervised fine-tuning first.
        lr: learning rate.
        seed: of the problems and the sampler.
        check_rows: rounds in which a second model learns from the same rows one by one, to compare the losses.
        output: folder of the record and its picture.
    """
    from examples.live.sampler import VLLM

    start = warm_start(steps=warm_steps, seed=seed)
    tokenizer, model, sampler = load_tokenizer(), load(start), VLLM(start, seed=seed)
    other = copy.deepcopy(model) if check_rows else None
    optimizers = [torch.optim.AdamW(one.parameters(), lr=lr, weight_decay=0.0) for one in (model, other) if one]
    engine, drawn, history = tt.TreeEngine(model, budget=BUDGET), draw(TRAINED, 480, seed=2000 + seed), []
    for number in range(rounds):
        times = [time.process_time()]
        rows = play(sampler, tokenizer, random.Random(f"{seed} {number}").sample(drawn, problems))
        times.append(time.process_time())
        result = engine.forward_backward(rows, LOSS)
        norm = update(model, optimizers[0])
        times.append(time.process_time())
        sampler.load(dict(model.named_parameters()))
        times.append(time.process_time())
        if compared := number < check_rows:
            rows_loss = rows_one_by_one(other, rows, LOSS)
            update(other, optimizers[1])
        rewards = {row.episode: row.reward for row in rows}
        history.append(
            {
                "round": number,
                "reward": sum(rewards.values()) / len(rewards),
                "loss": result.loss,
                "loss_one_by_one": rows_loss if compared else "",
                "grad_norm": norm,
                "mismatch_kl": result.metrics["rollout_kl"],
                "importance": result.metrics["importance"],
                "importance_min": result.metrics["importance_min"],
                "importance_max": result.metrics["importance_max"],
                "episodes": len(rewards),
                "rows": len(rows),
                "row_tokens": result.flat_tokens,
                "computed_tokens": result.computed_tokens,
            }
            | {f"{name}_cpu_seconds": b - a for name, a, b in zip(("play", "train", "load"), times, times[1:])}
        )
        print(*(f"{name} {value:.4g}" for name, value in history[-1].items() if value != ""), sep="  ", flush=True)
        write(history, Path(output))
    return history


def write(history: Sequence[dict[str, Any]], output: Path) -> None:
    """Write the record and its picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    output.mkdir(parents=True, exist_ok=True)
    with (output / "rounds.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(history[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(history)

    figure, (reward, mismatch, loss) = pyplot.subplots(1, 3, figsize=(10.5, 3), layout="constrained")
    column = {name: [entry[name] for entry in history] for name in history[0]}
    means = [sum(column["reward"][max(0, at - 4) : at + 1]) / min(at + 1, 5) for at in column["round"]]
    reward.plot(column["round"], column["reward"], ".", color="tab:blue", label="round")
    reward.plot(column["round"], means, color="tab:blue", label="mean of five")
    reward.set(title="reward", ylim=(0, 1.02))
    mismatch.fill_between(column["round"], column["importance_min"], column["importance_max"], alpha=0.2, linewidth=0)
    mismatch.plot(column["round"], column["importance"], label="importance ratio: mean, range")
    kl = mismatch.twinx()
    kl.plot(column["round"], column["mismatch_kl"], color="tab:red", label="KL(sampler, trainer), nats, right")
    kl.set(ylim=(0, None))
    mismatch.set(title="trainer to sampler", ylim=(0, None))
    loss.plot(column["round"], column["loss"], color="tab:green", label="as a tree")
    checked = [entry for entry in history if entry["loss_one_by_one"] != ""]
    if checked:
        alone = [entry["loss_one_by_one"] for entry in checked]
        loss.plot([entry["round"] for entry in checked], alone, "x", color="black", label="row by row")
    loss.set(title="loss")
    lines = mismatch.get_lines() + kl.get_lines()
    mismatch.legend(lines, [line.get_label() for line in lines], frameon=False, fontsize=8, loc="upper left")
    for axes in (reward, mismatch, loss):
        axes.set_xlabel("round")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25)
    reward.legend(frameon=False, fontsize=8, loc="upper left")
    loss.legend(frameon=False, fontsize=8)
    figure.savefig(output / "rounds.png", dpi=90)
    pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--problems", type=int, default=6, help="of a round; four episodes each")
    parser.add_argument("--warm-steps", type=int, default=10, help="of supervised fine-tuning, first")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-rows", type=int, default=0, help="rounds whose rows a second model learns one by one")
    parser.add_argument("--output", default="runs/live")
    main(**vars(parser.parse_args()))
