"""`TreeTrainer` inside Ray Train's `TorchTrainer`: workers on any nodes of a Ray cluster, restarted by Ray.

    python -m examples.cluster.ray_tree_trainer --workers 2 --output /shared/runs/first

Ray starts the workers, makes their process group and starts all of them again when one is lost (`--failures` times);
`resume_from_checkpoint=True` goes on from the newest whole checkpoint. `--output` must be on a file system that all
nodes share. Rows and model are loaded in the worker, so nothing large is sent there.
"""

import argparse
import os

import ray
import torch
from examples.countdown.agent import RECORDED, TASKS, TEMPLATE
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import treetrain as tt


def train(config: dict) -> None:
    """Run in every worker, whose process group is made and whose variables RANK, WORLD_SIZE and so on are set."""
    args = tt.TreeArguments(
        config["output"],
        max_steps=config["steps"],
        tokens_per_step=1500,
        learning_rate=3e-3,
        save_steps=config["save_steps"],
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not config["gpus"],
        ddp_backend=None if config["gpus"] else "gloo",
    )
    tokenizer = tt.load_tokenizer("tiny")
    loaded = tt.load(RECORDED, tokenizer=tokenizer, chat_template=TEMPLATE, tools="none")
    rows = [row for row in loaded.trajectories if row.group in TASKS]
    trainer = tt.TreeTrainer(tt.load_model("tiny"), args, rows, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    ray.train.report(
        trainer.state.log_history[-1] | {"step": trainer.state.global_step}
    )  # makes no copy of a checkpoint


def launch(worker, workers: int, output: str, failures: int, **config) -> ray.train.Result:
    """Run `worker(config)` in so many workers. What Ray writes of its own is put beside `output`."""
    gpus, output = torch.cuda.is_available(), os.path.abspath(output)
    trainer = TorchTrainer(
        worker,
        train_loop_config={"output": output, "gpus": gpus, **config},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus),
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
        run_config=RunConfig(storage_path=f"{output}.ray", failure_config=FailureConfig(max_failures=failures)),
    )
    return trainer.fit()


def make_parser(summary: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-steps", type=int, default=5)
    parser.add_argument("--failures", type=int, default=3, help="how often Ray starts all workers again")
    parser.add_argument("--output", default="runs/ray", help="a folder that all nodes share")
    return parser


if __name__ == "__main__":
    launch(train, **vars(make_parser("TreeTrainer on a Ray cluster.").parse_args()))
