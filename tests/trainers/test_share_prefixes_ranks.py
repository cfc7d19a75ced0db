"""Two processes under DistributedDataParallel train the same with shared prefixes as without."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainer_runs import BUILDERS, difference, train

from support.processes import Processes
from treetrain.parallel.process_group import GroupRanks


def both(
    group: Any, name: str, folder: str, dtype: torch.dtype, steps: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Train with shared prefixes and without on these processes; how far they are apart, and rank 0's weights."""
    import datasets
    from accelerate.state import AcceleratorState, GradientState, PartialState

    datasets.disable_progress_bars()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    runs = []
    for shared in (True, False):
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        runs.append(
            train(
                BUILDERS[name],
                Path(folder),
                shared=shared,
                dtype=dtype,
                steps=steps,
                evaluate=True,
                ddp_backend="gloo",
                **settings,
            )
        )
    assert runs[0].trainer.accelerator.num_processes == size
    found = difference(*runs)
    updates = torch.cat([x.flatten() for x in runs[0].updates.values()])
    return {"metrics": found.metrics, "weights": found.weights, "updates": found.updates, "own": updates.tolist()}


ONE_WITHOUT = {"masked": True, "per_device_train_batch_size": 4, "train_sampling_strategy": "sequential"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}),
    "sft padding-free lora": ("sft", {"padding_free": True, "lora": True}),
    "dpo": ("dpo", {"per_device_train_batch_size": 4}),
    "dpo lora": ("dpo", {"lora": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}),
    "grpo": ("grpo", {}),
    "grpo lora": ("grpo", {"lora": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}),
    "kto": ("kto", {"per_device_train_batch_size": 4}),
    "reward": ("reward", {"per_device_train_batch_size": 4}),
    "plain": ("plain", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}),
    "plain, one rank without labels": ("plain", ONE_WITHOUT),
    "experts, one rank without labels": ("plain", {"moe": True, **ONE_WITHOUT}),
    "plain budget": ("plain", {"budget": 40}),
}


def check(processes: Processes, case: str, folder: Any, dtype: torch.dtype, steps: int) -> dict[str, float]:
    """Train on both ranks, with and without, and compare; the ranks must hold the same weights."""
    name, settings = CASES[case]
    ranks = processes.run(both, name, str(folder), dtype, steps, settings, timeout=400)
    bound, bound_of_updates = {torch.float32: (1e-5, 1e-4), torch.float64: (1e-10, 1e-10)}[dtype]
    for rank in ranks:
        assert max(rank["metrics"], rank["weights"]) <= bound and rank["updates"] <= bound_of_updates, rank
    assert ranks[0]["own"] == ranks[1]["own"]
    return {name: max(rank[name] for rank in ranks) for name in ("metrics", "weights", "updates")}


def test_two_processes_train_the_same_with_shared_prefixes(two, tmp_path):
    check(two, "sft", tmp_path, torch.float32, 2)


def averages(group: Any, folder: str) -> int:
    """How often three optimizer steps, whose gradients are clipped, average gradients."""
    average, calls = GroupRanks.average_gradients, []

    def counted(ranks: GroupRanks, parameters: list[Any]) -> None:
        calls.append(len(parameters))
        average(ranks, parameters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupRanks, "average_gradients", counted)
        both(group, "sft", folder, torch.float32, 3, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1})
    return len(calls)


@pytest.mark.slow
def test_gradients_are_averaged_once_in_a_step(two, tmp_path):
    assert two.run(averages, str(tmp_path), timeout=400) == [3, 3]


@pytest.mark.parametrize("kind", ["plain", "experts"])
def test_a_process_may_have_nothing_to_predict(two, kind, tmp_path):
    check(two, f"{kind}, one rank without labels", tmp_path, torch.float32, 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_the_same_after_twenty_steps(two, case, dtype, tmp_path, record_property):
    record_property("errors", check(two, case, tmp_path, dtype, 20))
