"""Muon for the matrices of hidden layers, AdamW for the rest, as one optimiser."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` and `torch.optim.AdamW` over one list of groups and one state.

    A schedule drives both, and states are saved and loaded as those of any optimiser.

    Args:
        muon, adamw: over different parameters.
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        self.members = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
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
        first = len(self.members[0].param_groups)
        for member, groups in zip(self.members, (self.param_groups[:first], self.param_groups[first:]), strict=True):
            member.param_groups, member.state = groups, self.state


class MuonFactory:
    """Makes the optimiser of a model, in the form that `Trainer(optimizer_cls_and_kwargs=...)` takes.

    Muon takes the matrices of hidden layers; AdamW takes embeddings, head, vectors, and arrays of more dimensions, such
    as stacked experts.
    """

    def __call__(
        self,
        model: nn.Module,
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> torch.optim.Optimizer:
        """The optimiser.

        Args:
            lr: of both; Muon's updates are scaled to the size of AdamW's.
            weight_decay: of matrices; vectors are not decayed.
            momentum: of Muon.
            betas, eps: of AdamW.

        Raises:
            ValueError: no matrix of a hidden layer is trained.
        """
        outer = {id(p) for module in _outer_layers(model) for p in module.parameters()}
        trained = [p for p in model.parameters() if p.requires_grad]
        hidden = [p for p in trained if p.ndim == 2 and id(p) not in outer]
        if not hidden:
            raise ValueError("optim is muon, but no matrix of a hidden layer is trained; use adamw_torch")
        taken = {id(p) for p in hidden}
        rest = [p for p in trained if id(p) not in taken]
        muon = torch.optim.Muon(
            hidden, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
        )
        if not rest:
            return muon
        decayed, others = [p for p in rest if p.ndim > 1], [p for p in rest if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        adamw = torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps)
        return MuonWithAdamW(muon, adamw)


def _outer_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Embeddings of any kind, and the head."""
    yield from (module for module in model.modules() if isinstance(module, nn.Embedding))
    for name in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, name)() if hasattr(model, name) else None
        if module is not None:
            yield module


def muon_and_options(args: TrainingArguments) -> tuple[type[MuonFactory], dict[str, Any]]:
    """The factory and its options; `optim_args` may give Muon's momentum ("momentum=0.9").

    Raises:
        ValueError: another option.
    """
    pairs = [pair.partition("=") for pair in (args.optim_args or "").replace(" ", "").split(",") if pair]
    unknown = [name for name, _, _ in pairs if name != "momentum"]
    if unknown:
        raise ValueError(f"optim_args has {unknown[0]!r}; with optim muon it takes momentum")
    return MuonFactory, {
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        **{name: float(value) for name, _, value in pairs},
    }
