"""Runs of `TreeTrainer` over several processes are those of one process on the same rows."""

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from support.fsdp_on_cpus import let_accelerate_shard
from support.models import VOCAB, make_model
from support.processes import Processes
from support.tree_runs import SKIPPED, branching_rows, error, preference_rows, run, small_model, weights
from treetrain.parallel.process_group import is_sharded
from treetrain.trainers.checkpoints import whole_state

GRPO = {"loss": "grpo", "loss_kwargs": {"kl": 0.05}, "updates_per_batch": 2, "minibatches": 2, "tokens_per_step": 240}
CASES: dict[str, dict[str, Any]] = {
    "sft": {},
    "sft in three calls within a budget": {"gradient_accumulation_steps": 3, "budget": 24},
    "grpo": GRPO,
    "grpo in two calls": GRPO | {"gradient_accumulation_steps": 2, "loss_kwargs": {"entropy": 0.01}},
    "dpo": {"loss": "dpo"},
    "lora": {"lora": True},
    "two adapters": GRPO | {"lora": True, "adapters": True},
    "linear": {"execution": "linear"},
    "experts, and ranks without rows": {"tokens_per_step": 16, "gradient_accumulation_steps": 2, "experts": True},
}


def made(case: str, way: str, dtype: torch.dtype, *, steps: int, folder: Any = None) -> dict[str, Any]:
    """Train on a case; return the log, and the weights as one process would have them.

    Args:
        way: "alone", "ddp", "fsdp" (the model is given to `fully_shard` before) or "accelerate" (`--fsdp`).
    """
    settings = dict(CASES[case])
    rows = preference_rows() if settings.get("loss") == "dpo" else branching_rows()
    held = 2 if settings.get("loss") == "dpo" else 3
    model, options = small_model(dtype), {}
    if settings.pop("experts", False):
        model = make_model("qwen3_moe", dtype, output_router_logits=True, router_aux_loss_coef=0.5)
        rows = [row.replace(ids=row.ids % VOCAB) for row in rows]
    if settings.pop("lora", False):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
        if settings.pop("adapters", False):
            model.add_adapter("other", config)
            rows = [row.replace(key=(None, "other")[number % 2]) for number, row in enumerate(rows)]
    if settings.get("loss") == "dpo" or (way == "fsdp" and "kl" in settings.get("loss_kwargs", {})):
        options["ref_model"] = small_model(dtype, seed=5 if settings["loss"] == "dpo" else 1)
    if way == "accelerate":
        let_accelerate_shard()
        settings |= {"fsdp": True}
    if way == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.get_submodule("base_model.model" if hasattr(model, "peft_config") else "").model.layers:
            fully_shard(layer)
        fully_shard(model)
    trainer = run(
        model,
        rows[held:],
        eval_rows=rows[:held],
        options=options,
        max_steps=steps,
        eval_strategy="steps",
        eval_steps=steps // 2,
        folder=folder,
        **settings,
    )
    if folder is not None:
        trainer.save_model()
    assert is_sharded(trainer.model) == (way in ("fsdp", "accelerate"))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    whole = {n: t for n, t in model.state_dict().items() if n not in frozen}
    state = whole_state(model) if is_sharded(model) else whole
    weights = {name: tensor.double().numpy() for name, tensor in state.items()}
    return {"log": trainer.state.log_history, "weights": weights}


def run_on_rank(group: Any, case: str, way: str, dtype: torch.dtype, steps: int, folder: Any = None) -> dict[str, Any]:
    """`made` on this rank of all that there are."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # accelerate sets it for good; an earlier run here may have sharded
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return made(case, way, dtype, steps=steps, folder=folder)


def column(log: list[dict[str, Any]], name: str) -> np.ndarray:
    """Values logged under a name."""
    return np.array([record[name] for record in log if name in record], np.float64)


FAST = {("grpo", "fsdp"), ("two adapters", "ddp")}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def check(found: list[dict[str, Any]], truth: dict[str, Any], tolerance: float) -> None:
    first, other = found
    names = {n for record in truth["log"] for n in record if not any(part in n for part in SKIPPED)}
    apart = {name: error(column(first["log"], name), column(truth["log"], name)) for name in names}
    assert "eval_nll" in names and "grad_norm" in names
    assert column(other["log"], "loss").tolist() == column(first["log"], "loss").tolist()
    whole = [np.concatenate([each["weights"][name].ravel() for name in truth["weights"]]) for each in (first, truth)]
    apart["weights"] = error(*whole)
    assert max(apart.values()) < tolerance, {name: value for name, value in apart.items() if value >= tolerance}
    assert column(first["log"], "tree/flat_tokens").tolist() == column(truth["log"], "tree/flat_tokens").tolist()
    assert column(first["log"], "tree/unique_tokens").tolist() == column(truth["log"], "tree/unique_tokens").tolist()


WAYS = [(case, way) for case in CASES for way in ("ddp", "fsdp", "accelerate")]
WAYS = [pair for pair in WAYS if pair[0] != "two adapters" or pair[1] == "ddp"]  # refused under FSDP


@pytest.mark.parametrize(
    ("case", "way"), [pair if pair in FAST else pytest.param(*pair, marks=pytest.mark.slow) for pair in WAYS]
)
def test_two_processes_train_as_one_in_float64(two, case, way, tmp_path) -> None:
    steps = 3 if (case, way) in FAST else 20
    found = two.run(run_on_rank, case, way, torch.float64, steps, tmp_path / "out", timeout=180)
    check(found, made(case, "alone", torch.float64, steps=steps), TOLERANCE[torch.float64])


@pytest.mark.parametrize("way", ["fsdp", "accelerate"])
def test_rows_of_several_adapters_are_refused_in_shards(two, way) -> None:
    with pytest.raises(AssertionError, match=r"adapter.*not been verified"):
        two.run(run_on_rank, "two adapters", way, torch.float64, 2, timeout=180)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp", "accelerate"])
def test_a_model_trained_in_shards_or_copies_is_saved_as_one(two, way, tmp_path) -> None:
    found = two.run(run_on_rank, "sft", way, torch.float32, 4, tmp_path / "out", timeout=180)
    saved = weights(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert all(error(saved[name], found[0]["weights"][name]) == 0 for name in saved)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_four_processes_train_as_one(way, tmp_path) -> None:
    four = Processes(4)
    try:
        found = four.run(run_on_rank, "grpo", way, torch.float64, 8, tmp_path / "out", size=4, timeout=240)
    finally:
        four.stop()
    check([found[0], found[3]], made("grpo", "alone", torch.float64, steps=8), TOLERANCE[torch.float64])
