"""The simulator against real steps of 2 and 4 processes on this machine, for each way to split them.

Run: python benchmarks/simulate_check.py [--ranks 2 4] [--repeats 2] [--dry-run]. It takes about 3 minutes.

The calls of one task of tau_airline (workloads.py) on a Qwen3-shaped model of 5.7M parameters, float32, SFT and AdamW,
one thread per process, gloo, all processes of a run on the same cores at the same time: FSDP2, FSDP2 with copies, whole
copies (ddp), context parallel, tensor parallel. The simulator's inputs are measured in the same processes: speeds by
the calibration (at the same time on all ranks, so that cores that are shared are slow), links by collectives of two
sizes, and the optimiser's bandwidth. Plans are made by formula, as in the engine. The script stops unless passes and
tokens are equal; times and memory are compared. It needs a quiet machine, and warns if it was busy.

waiting_and_links: time that a rank does not spend on arithmetic (wall time minus thread time), mean of the ranks; other
work on the machine counts as well. Memory: peak resident set above that before the model was made; predicted: the
simulator's peak of the fullest rank. Rows are appended to results/simulate_check.csv.
"""

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rows as result_rows
from treetrain.core.planning.cost import CostModel
from treetrain.core.planning.devices import DEVICES, Device
from treetrain.core.tree.token_tree import build_tree
from treetrain.simulation.simulate import OPTIMISER_BYTES, Simulation, simulate
from treetrain.simulation.splits import Split
from workloads import VOCAB, shaped

TASK = "tau_airline_calls"
BUDGET = 1024
"""Tokens of each rank."""
HIDDEN, LAYERS = 192, 6
BUSY = 0.5
"""Processes that wait for a core before the script starts, from which it warns."""


def splits(size: int) -> dict[str, Split]:
    """The ways to use so many ranks."""
    found = {
        "fsdp": Split(size, shards=size),
        "ddp": Split(size),
        "context": Split(size, context=size),
        "tensor": Split(size, tensor=size),
    }
    return found | ({"fsdp, 2 copies": Split(size, shards=size // 2)} if size > 2 else {})


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
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def resident(name: str) -> int:
    """Bytes of this process by /proc: VmRSS now, VmHWM at most."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(name))


def calibrated(rank: int, size: int, make: Callable[[], Any] = small_model) -> dict[str, Any]:
    """Measure speeds of this machine on a model while all ranks work."""
    import torch
    import torch.distributed as dist

    from links import measured_links
    from treetrain.check.bench import measured_cost

    model = make()
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
    return {"speeds": dataclasses.asdict(speeds), "optimiser": seconds, "links": measured_links()}


def counted(model: Any) -> list[tuple[bool, int]]:
    """Record the model's calls from now on: with or without graph, and tokens."""
    import torch

    calls: list[tuple[bool, int]] = []

    def note(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        calls.append((torch.is_grad_enabled(), named["input_ids"].shape[1]))

    model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    return calls


def steps(rank: int, size: int, parallel: str, batch: list[Any], repeats: int, folder: str) -> dict[str, Any]:
    """Real steps; the first is not timed."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    import treetrain as tt
    from treetrain.models.costs import cost_of
    from treetrain.parallel.balance import dispatch

    small_model()  # loads what a model needs besides its weights
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before = resident("VmRSS")
    split = splits(size)[parallel]
    sharing: dict[str, Any] = {}
    if parallel == "tensor":
        config = DistributedConfig(tp_plan="auto", tp_size=size)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).eval()
    else:
        model = small_model()
    own = [range(len(batch))] * size
    if split.data > 1:
        own = dispatch(tt.build_tree(batch), cost_of(model), size)
    if parallel in ("ddp", "context"):
        sharing = {"group" if parallel == "ddp" else "context": dist.group.WORLD}
    if split.shards > 1:
        mesh = init_device_mesh("cpu", (split.copies, split.shards), mesh_dim_names=("copies", "shards"))
        mesh = mesh if split.copies > 1 else mesh["shards"]
        for layer in model.base_model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    calls = counted(model)
    optimiser = torch.optim.AdamW(model.parameters(), foreach=parallel != "tensor")  # not with DTensors beside tensors
    engine = tt.TreeEngine(model, budget=BUDGET, **sharing)
    walls, works = [], []
    for number in range(repeats + 1):
        calls.clear()
        dist.barrier()
        wall, work = time.perf_counter(), time.thread_time()
        engine.forward_backward([batch[row] for row in own[rank]], tt.losses.sft())
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
        "peak": resident("VmHWM") - before,
    }


def described(told: list[dict[str, Any]], speeds: Any, parameters: int) -> tuple[Device, Any]:
    """(device, speeds) of one of several ranks, from what all of them measured."""

    def middle(*keys: Any) -> float:
        values = []
        for value in told:
            for key in keys:
                value = value[key]
            values.append(value)
        return statistics.median(values)

    measured = {name: middle("speeds", name) for name in told[0]["speeds"] if name != "source"}
    device = dataclasses.replace(
        DEVICES["cpu"],
        memory_bandwidth=parameters * OPTIMISER_BYTES / middle("optimiser"),
        **{name: middle("links", name) for name in told[0]["links"]},
    )
    return device, dataclasses.replace(speeds, **measured, source="measured while all ranks worked")


def compared(
    size: int, parallel: str, tree: Any, told: list[dict[str, Any]], found: list[dict[str, Any]]
) -> dict[str, Any]:
    """A row: predicted beside measured. Raises RuntimeError where counts differ."""
    from treetrain.models.costs import cost_of
    from treetrain.simulation.rank_plans import plan_ranks

    cost, split, preset = cost_of(small_model()), splits(size)[parallel], Device.of_kind("cpu", 4)
    device, speeds = described(told, cost.speeds, cost.counts.parameters)
    (said,) = simulate(tree, cost.counts, [split], device, budget=BUDGET, speeds=speeds, planned_for=preset)
    assert isinstance(said, Simulation)
    planned = plan_ranks(
        tree,
        CostModel.on(preset, cost.counts, shards=split.shards, copies=split.copies),
        split.data,
        budget=BUDGET * split.context,
        aligned=split.shards > 1,
    )
    passes = [own["passes"] for own in found]
    # Stand-ins are a token each; context-parallel ranks pad their shares.
    group = split.context * split.tensor
    tokens = [own["tokens"] - (own["forwards"] - plan.num_parts) for own, plan in zip(found[::group], planned.plans)]
    same = max(passes) == said.passes and (split.context > 1 or tokens == said.tokens)
    if not same:
        raise RuntimeError(f"counts differ: {passes} passes of {said.passes}, {tokens} tokens of {said.tokens}")
    # The slowest rank of each step, then the middle step.
    seconds = statistics.median(max(one) for one in zip(*(own["seconds"] for own in found)))
    idle = [wall - work for own in found for wall, work in zip(own["seconds"], own["work"])]
    rest = said.waiting_seconds + sum(said.link_seconds.values())
    means = said.work_seconds * (1 - 1 / said.imbalance)
    return {
        "task": TASK,
        "parameters": cost.counts.parameters,
        "ranks": size,
        "parallel": parallel,
        "budget": BUDGET,
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
    load = os.getloadavg()[0]
    if load > BUSY:
        print(f"warning: {load:.1f} processes want a core already; times will be too long")
    batch = shaped(f"{TASK}_48")
    tree = build_tree(batch)
    with tempfile.TemporaryDirectory() as folder:
        small_model().save_pretrained(folder)
        for size in options.ranks:
            told = result_rows.on_ranks(calibrated, size)
            for parallel in splits(size):
                found = result_rows.on_ranks(steps, size, parallel, batch, options.repeats, folder)
                row = compared(size, parallel, tree, told, found)
                result_rows.report("simulate_check", row, dry_run=options.dry_run)


if __name__ == "__main__":
    main()
