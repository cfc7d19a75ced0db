"""The simulator against real steps of 2 and 4 processes on this machine, under FSDP2 and DDP.

Run: python benchmarks/simulate_check.py [--ranks 2 4] [--repeats 2] [--dry-run]

The calls of one task of tau_airline (workloads.py) on a Qwen3-shaped model of 5.7M parameters, float32, SFT and AdamW,
one thread per process, all processes of a run on the same cores at the same time. The simulator's inputs are
measured in the same processes: speeds by the calibration (at the same time on all ranks, so that cores that
are shared are slow), bytes per second and fixed seconds of collectives, and the optimiser's bandwidth. Plans are made
by formula, as in the engine. The script stops unless passes and tokens are equal; times and memory are compared.

waiting_and_links: time that a rank does not spend on arithmetic (wall time minus thread time), mean of the ranks; other
work on the machine counts as well. Memory: peak resident set above that before the model was made; predicted: the
simulator's peak of the fullest rank. Rows are appended to results/simulate_check.csv; left out without the data.
"""

import argparse
import dataclasses
import multiprocessing
import os
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import rows as result_rows
from workloads import DATA, VOCAB, load_workload

TASK = "tau_airline_calls"
CASES = (("fsdp", 1024), ("fsdp", 4096), ("ddp", 1024))
"""How weights are shared, and the budget in tokens."""
HIDDEN, LAYERS = 192, 6
SIZES = (1 << 16, 1 << 23)
"""Bytes of the collectives that are timed."""


def small_model() -> Any:
    """The model, the same on every rank."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def resident(name: str) -> int:
    """Bytes of this process by /proc: VmRSS now, VmHWM at most."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(name))


def links(size: int) -> tuple[float, float]:
    """(fixed seconds of a collective, bytes per second that a rank receives), by all-gathers of two sizes."""
    import torch
    import torch.distributed as dist

    times = []
    for count in SIZES:
        whole, own = torch.empty(count // 4), torch.empty(count // 4 // size)
        seconds = []
        for _ in range(8):
            dist.barrier()
            start = time.perf_counter()
            dist.all_gather(list(whole.split(len(own))), own)
            seconds.append(time.perf_counter() - start)
        times.append(statistics.median(seconds))
    moved = (SIZES[1] - SIZES[0]) * (size - 1) / size
    speed = moved / max(times[1] - times[0], 1e-6)
    return max(times[0] - SIZES[0] * (size - 1) / size / speed, 1e-6), speed


def calibrated(rank: int, size: int) -> dict[str, Any]:
    """Measure speeds of this machine while all ranks work."""
    import torch
    import torch.distributed as dist

    from treetrain.verification.bench import measured_cost

    model = small_model()
    dist.barrier()
    speeds = measured_cost(model).speeds
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimiser = torch.optim.AdamW(model.parameters(), foreach=True)
    optimiser.step()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(3):
        optimiser.step()
    seconds = (time.perf_counter() - start) / 3
    dist.barrier()
    return {"speeds": dataclasses.asdict(speeds), "optimiser": seconds, "links": links(size)}


def counted(model: Any) -> list[tuple[bool, int]]:
    """Record the model's calls from now on: with or without graph, and tokens."""
    import torch

    calls: list[tuple[bool, int]] = []

    def note(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        calls.append((torch.is_grad_enabled(), named["input_ids"].shape[1]))

    model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    return calls


def steps(rank: int, size: int, parallel: str, budget: int, repeats: int) -> dict[str, Any]:
    """Real steps; the first is not timed."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import treetrain as tt
    from treetrain.engine.costs import cost_of
    from treetrain.planning.balance import dispatch
    from treetrain.tree import build_tree

    batch = load_workload(TASK)
    small_model()  # loads what a model needs besides its weights
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before = resident("VmRSS")
    model = small_model()
    own = dispatch(build_tree(batch), cost_of(model), size)[rank]
    sharing: dict[str, Any] = {"group": dist.group.WORLD}
    if parallel == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
        for layer in model.base_model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        sharing = {"reduce": "part"}
    calls = counted(model)
    optimiser = torch.optim.AdamW(model.parameters(), foreach=True)
    engine = tt.TreeEngine(model, budget=budget, **sharing)
    walls, works = [], []
    for number in range(repeats + 1):
        calls.clear()
        dist.barrier()
        wall, work = time.perf_counter(), time.thread_time()
        result = engine.forward_backward([batch[row] for row in own], tt.losses.sft())
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if number:
            walls.append(time.perf_counter() - wall)
            works.append(time.thread_time() - work)
    graphs = [tokens for graph, tokens in calls if graph]
    return {
        "seconds": walls,
        "work": works,
        "passes": 2 * len(graphs) + sum(not graph for graph, _ in calls),
        "forwards": len(graphs),
        "tokens": sum(graphs),
        "computed": result.computed_tokens,
        "parts": result.parts,
        "peak": resident("VmHWM") - before,
    }


def process(rank: int, size: int, port: int, pipe: Any, name: str, arguments: tuple[Any, ...]) -> None:
    """One rank of a run."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(size)}
    dist.init_process_group("gloo", rank=rank, world_size=size)
    pipe.send(globals()[name](rank, size, *arguments))
    dist.destroy_process_group()


def on_ranks(name: str, size: int, *arguments: Any, timeout: float = 300) -> list[Any]:
    """Results of a function of this file on each of several fresh processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes, started = [], []
    for rank in range(size):
        here, there = context.Pipe()
        one = context.Process(target=process, args=(rank, size, port, there, name, arguments), daemon=True)
        one.start()
        there.close()
        pipes.append(here)
        started.append(one)
    try:
        found = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(timeout):
                raise RuntimeError(f"{name}: rank {rank} of {size} did not come back in {timeout:g} s")
            found.append(pipe.recv())
        for one in started:
            one.join(10)
        return found
    finally:
        for one in started:
            one.kill()


def described(size: int, told: list[dict[str, Any]], parameters: int) -> tuple[Any, Any]:
    """(device, measured cost model) of one of so many ranks, from what all of them measured."""
    from treetrain.engine.costs import cost_of
    from treetrain.planning.devices import DEVICES
    from treetrain.planning.simulate import OPTIMISER_BYTES

    def middle(*keys: Any) -> float:
        values = []
        for value in told:
            for key in keys:
                value = value[key]
            values.append(value)
        return statistics.median(values)

    cost = cost_of(small_model())
    measured = {name: middle("speeds", name) for name in told[0]["speeds"] if name != "source"}
    speeds = dataclasses.replace(cost.speeds, **measured, source="measured while all ranks worked")
    speed = middle("links", 1)
    device = dataclasses.replace(
        DEVICES["cpu"],
        name=f"one of {size} processes here",
        memory_bandwidth=parameters * OPTIMISER_BYTES / middle("optimiser"),
        collective_seconds=middle("links", 0),
        link_bandwidth=speed,
        network_bandwidth=speed,
        node_ranks=size,
    )
    return device, dataclasses.replace(cost, speeds=speeds)


def compared(size: int, parallel: str, budget: int, told: list[dict[str, Any]], found: list[dict[str, Any]]) -> dict:
    """A row: predicted beside measured. Raises RuntimeError where counts differ."""
    from treetrain.engine.costs import cost_of
    from treetrain.planning.make import plan_ranks
    from treetrain.planning.simulate import simulate
    from treetrain.tree import build_tree

    model = small_model()
    cost, tree = cost_of(model), build_tree(load_workload(TASK))
    device, measured = described(size, told, cost.counts.parameters)
    said = simulate(tree, cost.counts, size, device, cost=cost, measured=measured, budget=budget, parallel=parallel)
    plans = plan_ranks(tree, cost, size, budget=budget, aligned=parallel == "fsdp").plans
    passes = [own["passes"] for own in found]
    tokens = [own["tokens"] - (own["forwards"] - plan.num_parts) for own, plan in zip(found, plans)]
    if max(passes) != said.passes or tokens != said.tokens:
        raise RuntimeError(f"counts differ: {passes} passes of {said.passes}, {tokens} tokens of {said.tokens}")
    # The slowest rank of each step, then the middle step.
    seconds = statistics.median(max(one) for one in zip(*(own["seconds"] for own in found)))
    idle = [wall - work for own in found for wall, work in zip(own["seconds"], own["work"])]
    rest = said.waiting_seconds + said.communication_seconds
    means = said.slowest_rank_seconds * (1 - 1 / said.imbalance)
    return {
        "task": TASK,
        "parameters": cost.counts.parameters,
        "ranks": size,
        "parallel": parallel,
        "budget": budget,
        "passes": said.passes,
        "tokens": " ".join(map(str, said.tokens)),
        "counts_equal": True,
        "seconds": f"{seconds:.3f}",
        "predicted_seconds": f"{said.step_seconds:.3f}",
        "measured_over_predicted": f"{seconds / said.step_seconds:.3f}",
        "waiting_and_links": f"{statistics.mean(idle):.3f}",
        "predicted_waiting_and_links": f"{rest + means:.3f}",
        "peak_mb": round(max(own["peak"] for own in found) / 1e6),
        "predicted_peak_mb": round(said.peak_bytes / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=(2, 4), help="numbers of processes")
    parser.add_argument("--repeats", type=int, default=2, help="timed steps")
    parser.add_argument("--dry-run", action="store_true", help="print, write nothing")
    options = parser.parse_args()
    if not DATA.is_dir():
        print(f"left out: {DATA} is not there; set TREETRAIN_SHARED_DATA")
        return
    for size in options.ranks:
        told = on_ranks("calibrated", size)
        for parallel, budget in CASES:
            found = on_ranks("steps", size, parallel, budget, options.repeats)
            row = compared(size, parallel, budget, told, found)
            result_rows.report("simulate_check", row, dry_run=options.dry_run)


if __name__ == "__main__":
    main()
