"""A small run of a trainer, started by torchrun on each host.

    torchrun ... tests/trainers/train_on_hosts.py {tree,shared,zero2} OUTPUT_DIR '{"max_steps": 12}'

Rank 0 adds a line to OUTPUT_DIR.steps for every step, and writes OUTPUT_DIR.result at the end. What is given under
"host1" counts where the variable HOST is 1.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

ZERO2 = {
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
}


class Steps(TrainerCallback):
    """A line per step with the number of ranks, for those who wait for it."""

    def __init__(self, path: Path, slow: float, slow_alone: float) -> None:
        self.path, self.slow, self.slow_alone = path, slow, slow_alone

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(self.slow if args.world_size > 1 else self.slow_alone)
        with self.path.open("a") as file:
            file.write(f"{state.global_step} {args.world_size}\n")


def main(kind: str, folder: Path, settings: dict[str, Any]) -> None:
    """Train and write the outcome."""
    from safe_runs import make_shared_trainer, make_trainer, make_tree_trainer, outcome

    torch.set_num_threads(1)
    of_host_1 = settings.pop("host1", {})
    given = settings | (of_host_1 if os.environ.get("HOST") == "1" else {})
    folder, first = Path(given.pop("folder", folder)), os.environ["RANK"] == "0"
    if version := given.pop("version", None):
        import transformers

        transformers.__version__ = version
    if given.pop("never_comes", False):
        time.sleep(600)
    steps = Steps(
        folder.with_name(f"{folder.name}.steps") if first else Path(os.devnull),
        given.pop("slow", 0.0),
        given.pop("slow_alone", 0.0),
    )
    given |= {"callbacks": (steps,), "ddp_backend": "gloo"}
    resume = True
    if kind == "zero2":
        import deepspeed  # pyright: ignore[reportMissingImports]

        from treetrain.trainers.share_prefixes import share_prefixes

        deepspeed.init_distributed("gloo")
        share, resume = given.pop("share", True), None
        # Without rows that begin alike, and so without their rounding: what is compared is sharing with not sharing.
        trainer = make_trainer(folder, kind=Trainer, dropout=0.0, deepspeed=ZERO2, **given | {"save_strategy": "no"})
        if share:
            share_prefixes(trainer, budget=64)
    elif kind == "tree":
        trainer = make_tree_trainer(folder, **{"fsdp": True} | given)
    else:
        trainer = make_shared_trainer(folder, **{"fsdp": True, "per_device_train_batch_size": 1} | given)
    trainer.train(resume_from_checkpoint=resume)
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    found: dict[str, Any] = outcome(trainer) if kind != "zero2" else {"weights": weights}
    if first:
        torch.save(found, folder.with_name(f"{folder.name}.result"))
    if kind == "zero2":
        trainer.accelerator.end_training()


def agent(options: dict[str, Any], kind: str, folder: Path, settings: dict[str, Any]) -> None:
    """torchrun's agent, whose workers are forked from a process that has imported all: a restart takes a second."""
    import multiprocessing

    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", "train_on_hosts", "safe_runs", "peft"])
    config = LaunchConfig(rdzv_backend="c10d", start_method="forkserver", monitor_interval=0.1, **options)
    elastic_launch(config, main)(kind, folder, settings)


if __name__ == "__main__":
    if sys.argv[1] == "agent":
        agent(json.loads(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), json.loads(sys.argv[5]))
    else:
        main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
