"""Training on a GPU, the tree beside the rows by themselves: one command for each kind.

    python3 benchmarks/gpu_training.py curve     # TreeTrainer, bf16, 300 steps: the loss curves of tree and linear
    python3 benchmarks/gpu_training.py fsdp2     # FSDP2 through accelerate in one process, and without

Each trains the built-in model on the games of examples/countdown, both ways from the same weights and on the same
batches, and appends a row per step to rows.jsonl in --out. The last line says how far the two curves are apart. All of
them run on a CPU too (--steps 2: does it run?).
"""

# ruff: noqa: E402
import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT)]

import torch
from examples.countdown.agent import RECORDED, TASKS, TEMPLATE

import rows as result_rows
import treetrain as tt

CUDA = torch.cuda.is_available()


def by_tree_trainer(steps: int, **settings: Any) -> list[dict[str, float]]:
    """A run on the single calls of the recorded games; returns its log, a record per step."""
    model, tokenizer = tt.load_model("tiny", seed=0), tt.load_tokenizer("tiny")
    calls = tt.load(RECORDED, tokenizer=tokenizer, chat_template=TEMPLATE, tools="none", view="calls").trajectories
    with tempfile.TemporaryDirectory() as folder:
        args = tt.TreeArguments(
            folder,
            max_steps=steps,
            tokens_per_step=16_384,
            learning_rate=1.5e-3,
            warmup_steps=min(20, steps),
            adam_beta2=0.98,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not CUDA,
            **({"bf16": True} | settings),
        )
        trainer = tt.TreeTrainer(model, args, [call for call in calls if call.group in TASKS])
        trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record]


def curve(steps: int) -> dict[str, list[dict[str, float]]]:
    """The tree and the linear execution of `TreeTrainer`."""
    return {name: by_tree_trainer(steps, execution=name) for name in ("tree", "linear")}


def fsdp2(steps: int) -> dict[str, list[dict[str, float]]]:
    """One process without FSDP2 and with it, as accelerate wraps the model; in float32, so that both can be equal."""
    from accelerate.state import AcceleratorState

    found = {"plain": by_tree_trainer(steps, bf16=False)}
    AcceleratorState._reset_state(reset_partial_state=True)
    # What torchrun --nproc-per-node 1 sets.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29511")}
    if not CUDA:
        sys.path.append(str(ROOT / "tests"))
        from support.fsdp_on_cpus import let_accelerate_shard

        let_accelerate_shard()
    try:
        return found | {"fsdp2": by_tree_trainer(steps, bf16=False, fsdp=True)}
    finally:
        torch.distributed.destroy_process_group()


KINDS = {"curve": (curve, 300), "fsdp2": (fsdp2, 50)}


def main() -> int:
    """Run one kind; returns 1 if a curve is missing or not finite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--steps", type=int, help="optimizer steps instead of 300 and 50")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu", help="folder of the rows")
    options = parser.parse_args()
    train, steps = KINDS[options.kind]
    start = time.perf_counter()
    found = train(options.steps or steps)
    seconds = time.perf_counter() - start
    options.out.mkdir(parents=True, exist_ok=True)
    origin = result_rows.provenance() | ({"machine": torch.cuda.get_device_name()} if CUDA else {})
    (first, ours), (second, theirs) = found.items()
    with (options.out / "rows.jsonl").open("a", encoding="utf-8") as file:
        for number, (one, other) in enumerate(zip(ours, theirs)):
            row = {"kind": options.kind, "step": number, first: one["loss"], second: other["loss"]}
            row |= {"grad_norm": one["grad_norm"]} if "grad_norm" in one else {}
            file.write(json.dumps(row | origin) + "\n")
    apart = [abs(one["loss"] - other["loss"]) for one, other in zip(ours, theirs)]
    whole = torch.tensor([record["loss"] for record in [*ours, *theirs]])
    print(f"{options.kind}: {first} {ours[0]['loss']:.4f} -> {ours[-1]['loss']:.4f}, {second} {theirs[-1]['loss']:.4f}")
    print(f"at most {max(apart):.2e} apart in {len(apart)} steps, {seconds:.0f} s")
    return int(len(ours) != len(theirs) or not torch.isfinite(whole).all())


if __name__ == "__main__":
    sys.exit(main())
