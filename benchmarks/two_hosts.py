"""`treetrain simulate --nodes 2` beside the run that it predicts: TreeTrainer over two hosts, torchrun on each.

Run: python benchmarks/two_hosts.py [work ...] [--budget 1024] [--steps 5] [--dry-run]

The hosts are two network namespaces of this machine, with a virtual cable between them (tests/support/hosts.py: root,
iproute2), and have a process of one thread each: one core of two. SFT with AdamW on the model of workloads.py (30M
parameters, float32), all rows of a work in every step, as FSDP2 by accelerate and with whole weights (DDP).

The simulator gets the rows, the folder of the model, and a file of figures that are measured before: speeds of a long
and a short pass of one process, on both hosts at once, since they share the machine's memory; the optimiser's
bandwidth; the cable, by collectives of two sizes (links.py). No step is measured for it. A step lasts from the end of
one to the end of the next, optimiser included; the slower process and the median step count, without the first two.
waiting_and_links: wall time minus the thread's own, mean of both. Rows are appended to results/two_hosts.csv. It takes
about 5 minutes, and needs a quiet machine.
"""

import contextlib
import dataclasses
import io
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rows as result_rows
from workloads import load_workload, model_30m

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.hosts import NAMES, PORT, Host, Hosts, why_no_hosts

WORKS = ("search trees", "tool agent, think blocks dropped")
WARMUP = 2
SECONDS = 900.0
"""The longest that a run may take."""


# ---- In a process of torchrun


def calibrate(folder: Path) -> None:
    """Measure the speeds of this process and the links to the other, and write what both have found."""
    import torch
    import torch.distributed as dist

    from simulate_check import calibrated

    dist.init_process_group("gloo")
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, calibrated(dist.get_rank(), len(told), model_30m))
    if dist.get_rank() == 0:
        torch.save(told, folder / "told")
    dist.destroy_process_group()


def train(folder: Path, split: str, budget: int, steps: int) -> None:
    """Train, and write the wall and thread seconds of every timed step of this process, and the tokens it computed."""
    import torch
    from transformers import AutoModelForCausalLM, TrainerCallback

    import treetrain as tt
    from support.fsdp_on_cpus import let_accelerate_shard

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[tuple[float, float]] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append((time.perf_counter(), time.thread_time()))

    result_rows.keep_memory()
    if split == "fsdp":
        let_accelerate_shard()
    args = tt.TreeArguments(
        str(folder / split),
        max_steps=WARMUP + steps,
        tokens_per_step=10**9,
        budget=budget,
        fsdp=split == "fsdp",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
    )
    rows = tt.load(folder / "rows.jsonl").trajectories
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    clock = Clock()
    trainer = tt.TreeTrainer(model, args, rows, callbacks=[clock])
    trainer.train()
    timed = list(itertools.pairwise(clock.ends[WARMUP - 1 :]))
    tokens = next(entry["tree/computed_tokens"] for entry in trainer.state.log_history if "loss" in entry)
    found = {
        "wall": [after[0] - before[0] for before, after in timed],
        "thread": [after[1] - before[1] for before, after in timed],
        "tokens": tokens,
    }
    (folder / f"{split}.{os.environ['RANK']}.json").write_text(json.dumps(found))


# ---- Over both hosts


def on_hosts(hosts: list[Host], *words: Any) -> None:
    """Run this script on both, by torchrun. Raises RuntimeError with what they said if one fails."""
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", f"{NAMES[0]}:{PORT}", "--rdzv-id", "run", __file__]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])
    for host in hosts:
        host.start([sys.executable, *launcher, *map(str, words)], {"PYTHONPATH": path})
    for host in hosts:
        assert host.agent is not None
        if host.agent.wait(SECONDS):
            raise RuntimeError(f"host {host.number} failed:\n{host.text[-6000:]}")


def figures(told: list[dict[str, Any]]) -> str:
    """The file of a device, from what the processes measured."""
    from simulate_check import described
    from treetrain.models.costs import cost_of

    cost = cost_of(model_30m())
    counts = cost.counts
    device, speeds = described(told, cost.speeds, counts.parameters)
    flops = max(speeds.layers, speeds.attention)
    fixed = dataclasses.replace(device, layer_pass_seconds=0.0)
    weights = type(speeds).on(fixed, counts).graph_pass  # of memory: reading weights, writing gradients
    device = dataclasses.replace(
        device,
        flops=flops,
        efficiency=speeds.layers / flops,
        attention_efficiency=speeds.attention / flops,
        layer_pass_seconds=max(speeds.graph_pass - weights, 0.0) / counts.layers,
    )
    figures = {name: value for name, value in dataclasses.asdict(device).items() if value is not None}
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in figures.items())


def predicted(folder: Path, budget: int) -> dict[str, dict[str, Any]]:
    """What `treetrain simulate` prints of the two splits."""
    from treetrain.cli.simulate import run

    words = f"{folder}/rows.jsonl --model {folder}/model --ranks 2 --nodes 2 --device {folder}/host.toml"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run([*words.split(), "--budget", str(budget), "--context", "1", "--tensor", "1", "--json"])
    splits = json.loads(said.getvalue())["splits"]
    return {"ddp" if each["split"]["shards"] == 1 else "fsdp": each for each in splits}


def measure(work: str, budget: int, steps: int, dry_run: bool) -> None:
    """A row for each split of a work."""
    import torch

    with tempfile.TemporaryDirectory() as name, Hosts(folder := Path(name)) as hosts:
        model = model_30m()
        model.save_pretrained(folder / "model")
        with (folder / "rows.jsonl").open("w") as file:
            for row in load_workload(work):
                given = {"input_ids": row.ids.tolist(), "loss_weights": row.weights.tolist(), "group": row.group}
                file.write(json.dumps(given) + "\n")
        on_hosts(hosts, "calibrate", folder)
        told = torch.load(folder / "told")
        (folder / "host.toml").write_text(figures(told))
        for split, said in predicted(folder, budget).items():
            on_hosts(hosts, "train", folder, split, budget, steps)
            found = [json.loads((folder / f"{split}.{rank}.json").read_text()) for rank in range(2)]
            seconds = statistics.median(max(step) for step in zip(*(own["wall"] for own in found)))
            idle = statistics.mean(w - t for own in found for w, t in zip(own["wall"], own["thread"]))
            mean_wait = said["work_seconds"] * (1 - 1 / said["imbalance"])
            links = said["waiting_seconds"] + sum(said["link_seconds"].values()) + mean_wait
            row = {
                "work": work,
                "parameters": sum(p.numel() for p in model.parameters()),
                "hosts": 2,
                "split": split,
                "budget": budget,
                "cable_mb_per_second": round(
                    statistics.median(own["links"]["network_bandwidth"] for own in told) / 1e6
                ),
                "tokens": round(found[0]["tokens"]),
                "predicted_tokens": sum(said["tokens"]),
                "steps": steps,
                "seconds": f"{seconds:.3f}",
                "predicted_seconds": f"{said['step_seconds']:.3f}",
                "measured_over_predicted": f"{seconds / said['step_seconds']:.3f}",
                "waiting_and_links": f"{idle:.3f}",
                "predicted_waiting_and_links": f"{links:.3f}",
            }
            result_rows.report("two_hosts", row, dry_run=dry_run)


if __name__ == "__main__":
    if sys.argv[1:2] == ["calibrate"]:
        calibrate(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["train"]:
        train(Path(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
    elif refused := why_no_hosts():
        print(f"left out: {refused}")
    else:
        budget, steps = result_rows.count(1024), result_rows.count(5)
        result_rows.run_each(WORKS, measure, __doc__, budget=budget, steps=steps, dry_run=result_rows.DRY_RUN)
