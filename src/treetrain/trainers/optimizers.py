"""Muon for the matrices of hidden layers, AdamW for the rest, as one optimiser."""

from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments


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

    def __init__(
        self, model: Any, *, lr: float, weight_decay: float, momentum: float, betas: tuple[float, float], eps: float
    ) -> None:
        outer = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        outer += [model.get_input_embeddings(), model.get_output_embeddings()]
        elsewhere = {id(p) for module in outer if module is not None for p in module.parameters()}
        trained = [p for p in model.parameters() if p.requires_grad]
        hidden = [p for p in trained if p.ndim == 2 and id(p) not in elsewhere]
        if not hidden:
            raise ValueError("optim is muon, but no matrix of a hidden layer is trained; use adamw_torch")
        taken = {id(p) for p in hidden}
        rest = [p for p in trained if id(p) not in taken]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in rest if p.ndim > 1]},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        shared: Any = {"lr": lr, "weight_decay": weight_decay}
        muon = torch.optim.Muon(hidden, momentum=momentum, adjust_lr_fn="match_rms_adamw", **shared)
        self.members: list[torch.optim.Optimizer] = [muon]
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
    """A factory as `Trainer(optimizer_cls_and_kwargs=...)` takes it, and its options.

    `optim_args` may give Muon's momentum ("momentum=0.9"). Raises ValueError for anything else in it.
    """
    name, _, momentum = (args.optim_args or "momentum=0.95").replace(" ", "").partition("=")
    if name != "momentum":
        raise ValueError(f"optim_args has {name!r}; with optim muon it takes momentum")
    betas = args.adam_beta1, args.adam_beta2
    options = {"lr": args.learning_rate, "weight_decay": args.weight_decay, "momentum": float(momentum)}
    return lambda: MuonWithAdamW, options | {"betas": betas, "eps": args.adam_epsilon}
