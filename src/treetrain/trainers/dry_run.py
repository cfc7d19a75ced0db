"""Predicts a run of a `TreeTrainer` without training: its steps, tokens, sharing, a plan and the memory it takes."""

import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
import torch

from treetrain.core.engine.memory import free_bytes
from treetrain.core.planning.plan import Bytes, Plan
from treetrain.logs.columns import RowColumns
from treetrain.trainers.checkpoint_files import read_manifest
from treetrain.trainers.groups import Call, StepDataset
from treetrain.trainers.tree_trainer import OLD, REFERENCE, TreeTrainer

LOOKED_AT = 64
"""Trees are built of the calls of so many steps, and of the largest call of a pass."""


class DryTrainer(TreeTrainer):
    """A `TreeTrainer` that is not to train; it creates no repository on the hub."""

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The numbers of a run that has not begun."""

    rows: int
    groups: int
    tokens: int
    """Flat tokens of all rows."""
    tokens_of_steps: list[int]
    """Flat tokens of every step of the first pass."""
    steps: int
    """Optimizer steps of the whole run."""
    first_step: int
    """Steps that the checkpoint to be resumed has done."""
    looked_at: int
    """Steps whose trees were built; the next four numbers are of these."""
    flat_tokens: int
    unique_tokens: int
    linear_flops: float
    """0 if the model cannot be counted."""
    tree_flops: float
    computed: dict[str, str]
    """Facts that rows lack, and where the run gets them."""
    loss: str
    execution: str
    weights: int
    """Bytes of all parameters, those of a reference model too."""
    gradients: int
    optimizer: int | None
    """Bytes of the optimizer's state; None if it is not Adam."""
    activations: float | None
    """Bytes above these at the peak of the largest call; None if they cannot be counted."""
    free: int
    """Bytes that this process may still take for gradients, optimizer state and activations."""
    plan: str | None
    """The plan of the largest call in words."""

    @property
    def peak(self) -> float | None:
        """Predicted bytes at the peak of the largest call, of all tensors."""
        if self.activations is None or self.optimizer is None:
            return None
        return self.weights + self.gradients + self.optimizer + self.activations

    def facts(self) -> list[tuple[str, str]]:
        """Names and values to print."""
        sizes = self.tokens_of_steps
        per_step = f"{min(sizes):,} to {max(sizes):,} tokens, median {median(sizes):,.0f}"
        done = f" ({self.first_step:,} are done, by the checkpoint)" if self.first_step else ""
        in_all = round(sum(sizes) / len(sizes) * self.steps)
        steps = f"{self.steps:,}{done}, of about {in_all:,} tokens in all; a pass has {len(sizes):,}, of {per_step}"
        share = 1 - self.unique_tokens / max(self.flat_tokens, 1)
        sharing = f"{self.flat_tokens:,} tokens in rows, {self.unique_tokens:,} computed, overlap {share:.3f}"
        if self.tree_flops:
            sharing += f", {self.linear_flops / self.tree_flops:.2f} times as fast by FLOPs"
        if self.looked_at < len(sizes):
            sharing += f" (in the first {self.looked_at:,} steps)"
        if self.execution == "linear":
            sharing = "none: --execution linear computes every row by itself"
        held = {"weights": self.weights, "gradients": self.gradients, "optimizer state": self.optimizer}
        held |= {"activations of the largest call": self.activations}
        known = ", ".join(f"{name} {Bytes(round(size))}" for name, size in held.items() if size is not None)
        unknown = ", ".join(name for name, size in held.items() if size is None)
        memory = f"{known}; not counted: {unknown}" if self.peak is None else f"{Bytes(round(self.peak))}: {known}"
        needed = sum(size or 0 for name, size in held.items() if name != "weights")
        fits = f"{Bytes(self.free)} beside the weights"
        if needed > self.free:
            fits += ", which is not enough: set a smaller budget, --gradient_checkpointing or --lora"
        return [
            ("data", f"{self.rows:,} rows in {self.groups:,} group{'s' * (self.groups != 1)}, {self.tokens:,} tokens"),
            ("loss", self.loss),
            *([("computed first", "; ".join(f"{k}: {v}" for k, v in self.computed.items()))] if self.computed else []),
            ("steps", steps),
            ("sharing", sharing),
            ("predicted memory", memory),
            ("free memory", fits),
        ]


def predict(trainer: TreeTrainer, folder: Path, resume: str | bool | None = None) -> Prediction:
    """Check what `trainer.train(resume)` would check before the first step, and predict the run.

    Args:
        trainer: on one process; its own output folder is neither read nor written.
        folder: the output folder of the run.
        resume: whether, or from which checkpoint, the run would go on.

    Raises:
        the errors of `TreeTrainer.train` about folder, checkpoint, settings and rows.
    """
    trainer._check_best_metric()
    trainer._check_folder(folder, resume)
    trainer._resumed = trainer._choose(resume, folder)
    trainer._compare_facts()
    args, sampler, rows = trainer.args, trainer._sampler, trainer.train_dataset
    first_step = read_manifest(trainer._resumed)["step"] if trainer._resumed else 0
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * sampler.steps)
    trainer.create_optimizer_and_scheduler(steps)
    tokens = RowColumns(rows).tokens  # type: ignore[arg-type]
    calls: list[Call] = [call for (call,) in sampler]
    sizes = [int(tokens[call.rows].sum()) for call in calls]
    each = args.gradient_accumulation_steps
    data = StepDataset(rows, trainer.model, args)  # type: ignore[arg-type]
    inputs = [data[call] for call in islice(calls, LOOKED_AT * each)]
    largest = max([*inputs, data[calls[int(np.argmax(sizes))]]], key=lambda one: one["unique_tokens"])
    engine = trainer._engine_of(trainer.model)
    plan: Plan = engine.plan(largest["tree"])
    call = engine.prepared.call()
    engine._before_plan(call, largest["tree"])  # counts what its images need
    if trainer.loss.scope == "batch":  # every score is needed before the first gradient
        plan = call.plan_keeping_graphs(plan) or plan
    cost, known = call.cost, plan.purpose is not None and args.execution == "tree"
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    held = {*trainer.model.parameters(), *([] if (ref := trainer._ref_engine) is None else ref.model.parameters())}
    adam = isinstance(getattr(trainer.optimizer, "optimizer", trainer.optimizer), torch.optim.Adam | torch.optim.AdamW)
    computed = {} if trainer._batch.advantages is None else {"advantages": "from the rewards of each group"}
    sources = {OLD: "by the policy before a batch's first update", REFERENCE: "by the reference policy"}
    return Prediction(
        rows=len(tokens),
        groups=len(sampler.groups),
        tokens=int(tokens.sum()),
        tokens_of_steps=[sum(sizes[at : at + each]) for at in range(0, len(sizes), each)],
        steps=steps,
        first_step=first_step,
        looked_at=min(LOOKED_AT, sampler.steps),
        flat_tokens=sum(sizes[: len(inputs)]),
        unique_tokens=sum(one["unique_tokens"] for one in inputs),
        linear_flops=sum(one.get("linear_flops", 0.0) for one in inputs),
        tree_flops=sum(one.get("tree_flops", 0.0) for one in inputs),
        computed=computed | {fact: sources[fact] for fact in sorted(trainer._compute)},
        loss=f"{args.loss}{f' with {args.loss_kwargs}' if args.loss_kwargs else ''}",
        execution=args.execution,
        weights=sum(p.nbytes for p in held),
        gradients=sum(p.nbytes for p in trained),
        optimizer=2 * sum(p.nbytes for p in trained) if adam else None,
        activations=cost.peak_bytes(plan) if cost is not None else None,
        free=free_bytes(args.device),
        plan=plan.explain() if known and cost is not None else None,
    )
