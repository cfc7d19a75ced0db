"""A run of `TreeTrainer` on several ranks, as the processes of `support.processes` make it."""

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from support.fsdp_on_cpus import let_accelerate_shard
from support.tree_runs import branching_rows, preference_rows, run, small_model
from treetrain.engine.distributed import is_sharded
from treetrain.trainers.checkpoints import whole_state

GRPO = {"loss": "grpo", "loss_kwargs": {"kl": 0.05}, "updates_per_batch": 2, "minibatches": 2, "tokens_per_step": 240}
CASES: dict[str, dict[str, Any]] = {
    "sft": {},
    "sft in three calls within a budget": {"gradient_accumulation_steps": 3, "budget": 24},
    "grpo": GRPO,
    "grpo in two calls": GRPO | {"gradient_accumulation_steps": 2, "loss_kwargs": {"entropy": 0.01}},
    "dpo": {"loss": "dpo"},
    "lora": {"lora": True},
    "muon": {"optim": "muon"},
    "linear": {"execution": "linear"},
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
    if settings.pop("lora", False):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
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
