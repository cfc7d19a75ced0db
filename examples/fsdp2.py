"""A sharded model in your own script: FSDP2, the engine, an optimiser.

    torchrun --nproc-per-node 2 -m examples.fsdp2 --steps 20

Every process draws the same rows and takes a range of them; the ranges take about equal work. The engine finds the
process group from the model's shards; the loss it returns is that of all rows, on every process.
"""

import argparse
import random

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import treetrain as tt
from examples.countdown.agent import RECORDED, TASKS, TEMPLATE


def main(mesh: DeviceMesh, steps: int = 20, rows_per_step: int = 10, lr: float = 3e-3, seed: int = 0) -> list[float]:
    """Train the built-in model; returns the loss of every step, in nats."""
    model, tokenizer = tt.load_model("tiny", seed=seed), tt.load_tokenizer("tiny")
    model.to(mesh.device_type)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    loaded = tt.load(RECORDED, tokenizer=tokenizer, chat_template=TEMPLATE, tools="none")
    rows = [row for row in loaded.trajectories if row.group in TASKS]
    engine = tt.TreeEngine(model, budget=8192)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    loss_fn, cost = tt.losses.sft(), engine.cost
    drawn = random.Random(seed)  # the same rows on every process

    losses = []
    for step in range(steps):
        batch = drawn.sample(rows, min(rows_per_step, len(rows)))
        mine = tt.dispatch(batch, cost, mesh.size())[mesh.get_rank()]
        result = engine.forward_backward([batch[number] for number in mine], loss_fn)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss)
        if mesh.get_rank() == 0:
            print(f"step {step}: loss {result.loss:.4f}, {result.computed_tokens} of {result.flat_tokens} tokens")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A model in shards, in a script of your own.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows-per-step", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank(0))
    dist.init_process_group()
    main(init_device_mesh(kind, (dist.get_world_size(),)), **options)
    dist.destroy_process_group()
