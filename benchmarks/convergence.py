"""Does training with shared prefixes come out the same, and what does it cost? SFT, then GRPO, in TRL; three seeds.

Run: python benchmarks/convergence.py [--seeds 0 1 2] [--steps 120] [--rounds 12] [--picture-only]

The task is the countdown game of the examples, played with tools over several turns, by a model of 1.2M parameters.
The trainers are those of examples/trl_sft.py and examples/trl_grpo.py; `tt.share_prefixes` is the one difference
between the runs that are compared. SFT starts from random weights and trains on recorded games. GRPO starts, for both
runs of a seed, from what SFT without sharing has learned with that seed; TRL plays the games with the model that
learns.

One thread; times are of the processor, since wall time on a busy machine says little. results/convergence.csv has a row
for every step, results/convergence_final.csv one for every run, docs/images/convergence.png shows both.
"""

import argparse
import csv
import gzip
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import rows as result_rows

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
NAME, FINAL = "convergence", "convergence_final"
PICTURE = ROOT / "docs" / "images" / f"{NAME}.png"
HELD_OUT = ROOT / "examples" / "countdown" / "heldout.jsonl.gz"
ARMS = {"alone": False, "shared": True}
"""TRL by itself, and with `tt.share_prefixes`."""
GAMES = 16
"""Games of each of the four puzzles that a trained model plays for its final figures."""
LEARNING_RATE = 1e-4
"""Of GRPO: twice that of the example, for fewer rounds."""


def timed(trainer) -> list[tuple[float, float]]:
    """Let a trainer record, after every step, the seconds of training so far: all, and those spent generating."""
    from transformers import TrainerCallback

    found: list[tuple[float, float]] = []
    generating = begun = 0.0

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__):
            nonlocal begun
            begun = time.process_time()

        def on_step_end(self, *_, **__):
            found.append((time.process_time() - begun, generating))

    if hasattr(trainer, "_generate"):
        generate = trainer._generate

        def generate_timed(*arguments, **options):
            nonlocal generating
            start = time.process_time()
            try:
                return generate(*arguments, **options)
            finally:
                generating += time.process_time() - start

        trainer._generate = generate_timed
    trainer.add_callback(Clock())
    return found


def run(phase: str, arm: str, seed: int, length: int, model) -> dict[str, object]:
    """Train a model and append a row for every step; returns the row of the end."""
    from examples import trl_grpo, trl_sft

    with tempfile.TemporaryDirectory() as folder:
        if phase == "sft":
            trainer = trl_sft.make(length, seed, folder, ARMS[arm], model, logging_steps=1)
        else:
            trainer = trl_grpo.make(length, seed=seed, model=model, share=ARMS[arm], learning_rate=LEARNING_RATE)
        clock, wall = timed(trainer), time.perf_counter()
        trainer.train()
        wall = time.perf_counter() - wall
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for entry, (seconds, generating) in zip(logs, clock, strict=True):
        row = {
            "phase": phase,
            "arm": arm,
            "seed": seed,
            "step": int(entry["step"]),
            "loss": f"{float(entry['loss']):.6g}",
            "grad_norm": f"{float(entry['grad_norm']):.6g}",
            "reward": f"{float(entry['reward']):.4f}" if "reward" in entry else "",
            "cpu_seconds": f"{seconds:.2f}",
            "generating_seconds": f"{generating:.2f}",
        }
        result_rows.append(NAME, row)
    reward, solved = played(model)
    final = {
        "phase": phase,
        "arm": arm,
        "seed": seed,
        "steps": len(logs),
        "last_loss": f"{statistics.fmean(float(entry['loss']) for entry in logs[-5:]):.4f}",
        "held_out_nll": f"{held_out_nll(model):.4f}",
        "reward": f"{reward:.4f}",
        "solved": f"{solved:.4f}",
        "cpu_seconds": f"{clock[-1][0]:.1f}",
        "generating_seconds": f"{clock[-1][1]:.1f}",
        "wall_seconds": f"{wall:.1f}",
    }
    return final


def small_model(seed: int):
    """A Qwen3-shaped model of 1.2M parameters with the built-in tokenizer's vocabulary."""
    import torch
    from transformers import Qwen3ForCausalLM

    import treetrain as tt

    config = tt.load_model("tiny").config
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    config.hidden_size, config.intermediate_size = 192, 576
    config.num_attention_heads, config.num_key_value_heads = 3, 1
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config).eval()


def held_out_nll(model) -> float:
    """Nats per token of what the agents wrote in games of puzzles that nothing was trained on, each game by itself."""
    import torch

    from examples import trl_sft

    tokenizer, total, count = trl_sft.tokenizer_of_games(), 0.0, 0
    with gzip.open(HELD_OUT, "rt", encoding="utf-8") as lines:
        games = [json.loads(line)["messages"] for line in lines]
    for messages in games:
        for message in messages:
            message["content"] = message["content"] or ""
        encoded = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = torch.tensor([encoded["input_ids"]])
        said = torch.tensor(encoded["assistant_masks"][1:], dtype=torch.bool)
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        total -= float(logprobs.gather(1, ids[0, 1:, None])[said].sum())
        count += int(said.sum())
    return total / count


def played(model) -> tuple[float, float]:
    """Mean reward and share of solved games, of games with the same random draws for every model."""
    import torch
    from examples.countdown.agent import TASKS, play, recorded_puzzle

    import treetrain as tt

    torch.manual_seed(1)
    model.eval()
    games = play(model, tt.load_tokenizer("tiny"), [recorded_puzzle(task) for task in TASKS for _ in range(GAMES)])
    return statistics.fmean(game.reward for game in games), statistics.fmean(game.reward == 1 for game in games)


def apart(one, other, start) -> float:
    """Norm of the difference of two models over the norm of what training changed in the first."""
    pairs = zip(one.parameters(), other.parameters(), start.parameters())
    norms = [((a - b).square().sum().double(), (a - c).square().sum().double()) for a, b, c in pairs]
    return float((sum(d for d, _ in norms) / sum(n for _, n in norms)) ** 0.5)


def measure(seeds: list[int], steps: int, rounds: int) -> None:
    """Run both arms of both phases for every seed."""
    import torch

    torch.set_num_threads(1)
    result_rows.keep_memory()
    for seed in seeds:
        start = small_model(seed)
        for phase, length in (("sft", steps), ("grpo", rounds)):
            models = {}
            for arm in ARMS:
                models[arm] = small_model(seed)  # a copy of a model that a trainer had would keep the trainer's head
                models[arm].load_state_dict(start.state_dict())
                final = run(phase, arm, seed, length, models[arm])
                difference = apart(models["alone"], models["shared"], start) if len(models) == 2 else None
                final["apart"] = "" if difference is None else f"{difference:.1e}"
                result_rows.report(FINAL, final)
            start = models["alone"]


# ---- Picture


def last_rows(name: str, *key: str) -> list[dict[str, str]]:
    """The last row of each case in a file of results."""
    with (result_rows.RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list({tuple(row[column] for column in key): row for row in csv.DictReader(file)}.values())


def draw() -> None:
    """Loss of SFT and reward of GRPO, by step above and by seconds below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs: dict[tuple[str, str, str], list[dict[str, str]]] = defaultdict(list)
    for row in last_rows(NAME, "phase", "arm", "seed", "step"):
        runs[row["phase"], row["seed"], row["arm"]].append(row)
    figure, grid = pyplot.subplots(2, 2, figsize=(9, 6), layout="constrained", sharey="col")
    styles = {"alone": {"linewidth": 3.2, "alpha": 0.35}, "shared": {"linewidth": 1.2}}
    labels = {"alone": "TRL alone", "shared": "with share_prefixes"}
    for (phase, seed, arm), rows in sorted(runs.items()):
        column, value = (0, "loss") if phase == "sft" else (1, "reward")
        if phase == "grpo":  # of the two updates on the games of a round the first has the reward
            rows = [row for row in rows if row["reward"]]
        values = [float(row[value]) for row in rows]
        for line, at in enumerate(([int(row["step"]) for row in rows], [float(row["cpu_seconds"]) for row in rows])):
            label = f"{labels[arm]}, seed {seed}" if (column, line) == (0, 0) else None
            grid[line][column].plot(at, values, color=f"C{seed}", label=label, **styles[arm])
    grid[0][0].set(title="SFT on recorded games", ylabel="training loss, nats", xlabel="step")
    grid[0][1].set(title="GRPO on the model's own games", ylabel="mean reward of a round", xlabel="step")
    grid[1][0].set(ylabel="training loss, nats", xlabel="CPU seconds")
    grid[1][1].set(ylabel="mean reward of a round", xlabel="CPU seconds")
    grid[0][0].legend(frameon=False, fontsize=8)
    for axes in grid.flat:
        axes.grid(alpha=0.25)
    figure.savefig(PICTURE, dpi=110)
    print(PICTURE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120, help="of SFT")
    parser.add_argument("--rounds", type=int, default=12, help="of GRPO")
    parser.add_argument("--picture-only", action="store_true", help="draw the rows that are there")
    options = parser.parse_args()
    if not options.picture_only:
        measure(options.seeds, options.steps, options.rounds)
    draw()
