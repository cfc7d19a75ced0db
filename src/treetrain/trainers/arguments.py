"""The arguments of a `TreeTrainer`: those of `transformers.Trainer`, and those of trees, losses and rollouts; Muon."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import TrainingArguments

from treetrain.planning.make import Bytes, parse_budget

MUON = "muon"
"""A value of `optim` that transformers does not have."""
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
    "use_liger_kernel": "its fused loss takes the place of the head that trees are scored by",
}
"""Arguments of transformers that would be ignored or would not be exact, and what to do instead."""


@dataclass
class TreeArguments(TrainingArguments):
    """Arguments of a `TreeTrainer`: all of `transformers.TrainingArguments`, and these.

    Raises:
        ValueError: an argument that this trainer does not support; the message says what to set instead.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, "loss_kwargs", "advantage_kwargs"]

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
        default=32_768,
        metadata={
            "help": "Flat tokens of a step (of a batch, with several updates), about: it is filled with whole groups "
            "(else whole trees), in place of per_device_train_batch_size rows."
        },
    )
    temperature: float = field(
        default=1.0,
        metadata={"help": "Divides the logits; for policy losses the temperature that the rows were sampled with."},
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
    logging_steps: float = field(default=10, metadata={"help": "Log every so many steps; numbers are means over them."})

    def __post_init__(self) -> None:
        if self.execution not in ("tree", "linear"):
            raise ValueError(f"execution is {self.execution!r}; allowed are 'tree' and 'linear'")
        for name in ("tokens_per_step", "updates_per_batch", "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a whole number from 1")
        if self.target_kl is not None and self.updates_per_batch * self.minibatches == 1:
            raise ValueError(f"target_kl is {self.target_kl}, which needs updates_per_batch or minibatches above 1")
        if isinstance(parse_budget(self.budget), Bytes) and self.execution == "linear":
            raise ValueError(f"budget is {self.budget!r}, but linear execution packs tokens: give a number of tokens")
        defaults = {each.name: each.default for each in fields(TrainingArguments)}
        for name, instead in REFUSED.items():
            if getattr(self, name) not in (defaults[name], None):
                raise ValueError(f"{name} is {getattr(self, name)!r}, which TreeTrainer does not take: {instead}")
        muon = self.optim == MUON
        if muon:  # unknown to transformers, which checks the name
            self.optim = "adamw_torch"
        super().__post_init__()
        self.optim = MUON if muon else self.optim
        if self.n_gpu > 1:
            raise ValueError(
                f"this process sees {self.n_gpu} GPUs, and a process trains on one: start one for each "
                f"(torchrun --nproc-per-node {self.n_gpu}), or show it one by CUDA_VISIBLE_DEVICES"
            )
        for name in ("loss_kwargs", "advantage_kwargs"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, dict):
                raise ValueError(f"{name} is {value!r}; give a JSON object")


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` and `torch.optim.AdamW` over one list of groups and one state.

    Muon takes the matrices of hidden layers; AdamW takes embeddings, head, vectors (not decayed), and arrays of more
    dimensions, such as stacked experts. Muon's updates are scaled to the size of AdamW's, so that one learning rate
    serves both. A schedule drives both, and states are saved and loaded as those of any optimiser.

    Args:
        model: whose trained parameters are updated.

    Raises:
        ValueError: no matrix of a hidden layer is trained.
    """

    def __init__(self, model: Any, *, lr: float, weight_decay: float, betas: tuple[float, float], eps: float) -> None:
        outer = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        outer += [model.get_input_embeddings(), model.get_output_embeddings()]
        elsewhere = {id(p) for module in outer if module is not None for p in module.parameters()}
        hidden, arrays, vectors = [], [], []
        for p in (p for p in model.parameters() if p.requires_grad):
            (hidden if p.ndim == 2 and id(p) not in elsewhere else arrays if p.ndim > 1 else vectors).append(p)
        if not hidden:
            raise ValueError("optim is muon, but no matrix of a hidden layer is trained; use adamw_torch")
        shared: Any = {"lr": lr, "weight_decay": weight_decay}
        muon = torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw", **shared)
        self.members: list[torch.optim.Optimizer] = [muon]
        groups = [{"params": arrays}, {"params": vectors, "weight_decay": 0.0}]
        if groups := [group for group in groups if group["params"]]:
            self.members.append(torch.optim.AdamW(groups, betas=betas, eps=eps, **shared))
        super().__init__([group for member in self.members for group in member.param_groups], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each."""
        if closure is not None:
            raise ValueError("MuonWithAdamW takes no closure, which would be evaluated twice")
        for member in self.members:
            member.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.load_state_dict`."""
        super().load_state_dict(state_dict)
        self._share()  # loading makes new groups and a new state

    def _share(self) -> None:
        for member, groups in zip(self.members, (self.param_groups[:1], self.param_groups[1:])):  # Muon has one group
            member.param_groups, member.state = groups, self.state


def muon_and_options(args: TrainingArguments) -> tuple[Any, dict[str, Any]]:
    """A factory as `Trainer(optimizer_cls_and_kwargs=...)` takes it, and its options."""
    if args.optim_args:
        raise ValueError(f"optim_args is {args.optim_args!r}, and optim muon takes none: leave it out")
    betas = args.adam_beta1, args.adam_beta2
    options = {"lr": args.learning_rate, "weight_decay": args.weight_decay, "betas": betas, "eps": args.adam_epsilon}
    return lambda: MuonWithAdamW, options
