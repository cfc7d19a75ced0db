"""The arguments of a `TreeTrainer`: those of `transformers.Trainer`, and those of trees, losses and rollouts."""

import contextlib
import functools
import inspect
import json
import math
import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)

from treetrain.core.errors import expect, nearest
from treetrain.core.planning.make import Bytes, parse_budget
from treetrain.logs.advantages import group_advantages
from treetrain.logs.groups import TOKENS_PER_STEP
from treetrain.logs.once import checked_count
from treetrain.parallel.process_group import wait_for_ranks
from treetrain.trainers.run_folder import check_name

if TYPE_CHECKING:
    import torch

REFUSED: dict[str, str] = {
    "per_device_train_batch_size": "steps are filled with whole groups: set tokens_per_step, and "
    "gradient_accumulation_steps to run a step in several calls",
    "train_sampling_strategy": "steps are filled with whole groups: set tokens_per_step",
    "dataloader_drop_last": "every row is trained",
    "auto_find_batch_size": "a budget bounds memory: set budget",
    "label_smoothing_factor": "losses have their own options: set loss_kwargs",
    "neftune_noise_alpha": "noise differs from row to row, so rows could not share their prefixes",
    "fp16": "a scaled float16 loss is not exact on a tree: set bf16",
    "fp16_full_eval": "evaluation runs as training does: set bf16",
    "bf16_full_eval": "evaluation runs as training does: set bf16",
    "deepspeed": "gradients are reduced by DDP or FSDP2: set fsdp",
    "torch_compile": "a compiled model cannot be switched into tree mode: set compile_layers",
    "torch_compile_backend": "a compiled model cannot be switched into tree mode: set compile_layers",
    "torch_compile_mode": "a compiled model cannot be switched into tree mode: set compile_layers",
    "use_liger_kernel": "its fused loss takes the place of the head that trees are scored by",
    "liger_kernel_config": "its fused loss takes the place of the head that trees are scored by",
}
"""Arguments of transformers that would be ignored or would not be exact, and what to do instead."""
FROM_ONE = ("gradient_accumulation_steps", "tokens_per_step", "updates_per_batch", "minibatches", "max_skipped_steps")
"""Arguments that must be whole numbers from 1."""
FROM_ZERO = (
    *("learning_rate", "weight_decay", "max_grad_norm", "num_train_epochs"),
    *("warmup_steps", "logging_steps", "eval_steps", "save_steps"),
)
"""Arguments that must be numbers from 0. transformers does not check them, or only when training begins."""


@dataclass
class TreeArguments(TrainingArguments):
    """Arguments of a `TreeTrainer`: all of `transformers.TrainingArguments`, and these.

    Raises:
        ValueError: an argument that this trainer does not support; the message says what to set instead.
    """

    execution: str = field(
        default="tree",
        metadata={
            "help": "tree: every shared prefix is computed once. linear: every row by itself, to compare with.",
            "choices": ["tree", "linear"],
        },
    )
    budget: int | str | None = field(
        default=None,
        metadata={
            "help": "Tokens whose graph is alive at once (4096), or bytes above model, gradients and optimiser state "
            "(8GiB). Not given: what the device has free."
        },
    )
    compile_layers: bool | None = field(
        default=None,
        metadata={"help": "Run decoder layers compiled, around tree attention. Not given: on a GPU, without FSDP2."},
    )
    tokens_per_step: int = field(
        default=TOKENS_PER_STEP,
        metadata={
            "help": "Flat tokens of a step (of a batch, with several updates), about: it is filled with whole groups "
            "(else whole trees), in place of per_device_train_batch_size rows."
        },
    )
    temperature: float = field(
        default=1.0,
        metadata={"help": "Divides the logits; for policy losses the temperature that the rows were sampled with."},
    )
    count: str = field(
        default="per trajectory",
        metadata={
            "help": "How often a trained token counts that several rows repeat. per trajectory: in every row. once: in "
            "the first row of the data that trains it (within an episode, where rows have one).",
            "choices": ["per trajectory", "once"],
        },
    )
    loss: str = field(
        default="sft",
        metadata={"help": "sft, reinforce, ppo, grpo, dapo, dr_grpo, gspo, dpo or distill (docs/losses.md)."},
    )
    loss_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": """Options of the loss, as JSON: '{"clip": 0.2, "kl": 0.01}'."""},
    )
    advantage_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Options of group_advantages, as JSON, for rows that have rewards and no advantages: "
            """'{"divide_by_std": false}'."""
        },
    )
    updates_per_batch: int = field(
        default=1,
        metadata={"help": "Passes over every batch before the next one; each is a step, or several."},
    )
    minibatches: int = field(
        default=1, metadata={"help": "Parts of every pass over a batch, of whole groups, each a step."}
    )
    target_kl: float | None = field(
        default=None,
        metadata={"help": "Leave out the rest of a batch's updates after a step whose approx_kl was above this."},
    )
    max_skipped_steps: int = field(
        default=3,
        metadata={
            "help": "A step with a NaN or infinite gradient is skipped; stop after so many in a row, with a checkpoint."
        },
    )
    async_save: bool = field(
        default=False,
        metadata={
            "help": "Train on while a checkpoint is synced, hashed and named; shards are copied to CPU memory first."
        },
    )
    overwrite_output_dir: bool = field(
        default=False,
        metadata={"help": "A new run may replace what output_dir holds: models, and checkpoints of earlier runs."},
    )
    accept_changes: bool = field(
        default=False,
        metadata={"help": "Resume even if data, loss or settings are not those of the checkpoint."},
    )
    logging_steps: float = field(default=10, metadata={"help": "Log every so many steps; numbers are means over them."})

    @functools.cached_property
    def _setup_devices(self) -> "torch.device":  # makes the process group
        wait_for_ranks()
        return super()._setup_devices

    def __post_init__(self) -> None:
        if isinstance(self.output_dir, os.PathLike):
            self.output_dir = os.fspath(self.output_dir)
        expect("output_dir", self.output_dir, (str, type(None)), "the name of a folder")
        for each in fields(self):  # "false" would count as true
            truth = isinstance(each.default, bool) or each.name == "compile_layers"
            if truth and not isinstance(value := getattr(self, each.name), bool | None):
                raise ValueError(f"{each.name} is {value!r}; give True or False")
        for name, least in (("dataloader_num_workers", 0), ("dataloader_prefetch_factor", 1)):
            if (value := getattr(self, name)) is not None and (type(value) is not int or value < least):
                raise ValueError(f"{name} is {value!r}; give a whole number from {least}")
        if self.execution not in ("tree", "linear"):
            raise ValueError(f"execution is {self.execution!r}; allowed are 'tree' and 'linear'")
        checked_count(self.count)
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{each.name} is {value}; give a finite number")
        for names, least, number in ((FROM_ONE, 1, "whole number from 1"), (FROM_ZERO, 0, "number from 0")):
            for name in names:
                if (value := getattr(self, name)) is not None and value < least:
                    raise ValueError(f"{name} is {value}; give a {number}")
        if self.target_kl is not None and self.updates_per_batch * self.minibatches == 1:
            raise ValueError(f"target_kl is {self.target_kl}, which needs updates_per_batch or minibatches above 1")
        if isinstance(parse_budget(self.budget), Bytes) and self.execution == "linear":
            raise ValueError(f"budget is {self.budget!r}, but linear execution packs tokens: give a number of tokens")
        defaults = {each.name: each.default for each in fields(TrainingArguments)}
        for name, instead in REFUSED.items():
            if getattr(self, name) not in (defaults[name], None):
                raise ValueError(f"{name} is {getattr(self, name)!r}, which TreeTrainer does not take: {instead}")
        if self.optim_args and not all("=" in pair for pair in self.optim_args.split(",")):
            raise ValueError(f"optim_args is {self.optim_args!r}; give pairs, such as 'eps=1e-6,foreach=false'")
        self._read_dictionaries()
        if self.output_dir is not None:
            check_name(self.output_dir)
        super().__post_init__()
        for name in self.report_to:  # type: ignore[union-attr]
            if name not in INTEGRATION_TO_CALLBACK:
                raise ValueError(f"report_to is {name!r}; {nearest(name, ('none', *INTEGRATION_TO_CALLBACK))}")
            if name not in get_available_reporting_integrations() and name != "flyte":
                raise ValueError(f"report_to is {name!r}, which is not installed: install it, or set report_to to none")
        if self.n_gpu > 1:
            raise ValueError(
                f"this process sees {self.n_gpu} GPUs, and a process trains on one: start one for each "
                f"(torchrun --nproc-per-node {self.n_gpu}), or show it one by CUDA_VISIBLE_DEVICES"
            )

    def _read_dictionaries(self) -> None:
        """Read options that are given as JSON, and check the names of those of `group_advantages`."""
        for name in ("loss_kwargs", "advantage_kwargs", "lr_scheduler_kwargs"):
            value = option = getattr(self, name)
            with contextlib.suppress(ValueError):
                value = json.loads(option) if isinstance(option, str) else option
            if not isinstance(value, dict | None):
                raise ValueError(f"""{name} is {option!r}; give a JSON object, such as '{{"name": 0.1}}'""")
            setattr(self, name, value)
        known = [each for each in inspect.signature(group_advantages).parameters if each != "trajectories"]
        for name in self.advantage_kwargs or ():
            if name not in known:
                raise ValueError(f"advantage_kwargs: group_advantages has no option {name!r}; {nearest(name, known)}")
