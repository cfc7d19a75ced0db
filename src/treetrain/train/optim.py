"""The optimisers of a run: which parameters they update, which they decay, and what they need installed."""

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from treetrain.train.config import TrainConfig

SGD_MOMENTUM, MUON_MOMENTUM = 0.9, 0.95


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices are decayed; norms and biases, which are vectors, are not.

    Tied parameters are in one group once.
    """
    return _groups([p for p in model.parameters() if p.requires_grad], weight_decay)


def _groups(parameters: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def check_optimizer(config: TrainConfig) -> None:
    """Raise ValueError where the optimiser needs what is not installed; to be called before a model is loaded."""
    if config.optimizer == "adamw8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError("optimizer is adamw8bit, but bitsandbytes is not installed: pip install bitsandbytes")
    if config.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        raise ValueError(f"optimizer is muon, but torch {torch.__version__} has none: pip install 'torch>=2.9'")


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The configured optimiser over the model's trainable parameters.

    Raises:
        ValueError: the model has none, or the optimiser needs what is not installed.
    """
    check_optimizer(config)
    groups = parameter_groups(model, config.weight_decay)
    if not groups:
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient; nothing can be trained")
    betas = config.beta1, config.beta2
    match config.optimizer:
        case "sgd":
            return torch.optim.SGD(groups, lr=config.lr, momentum=_momentum(config, SGD_MOMENTUM))
        case "adafactor":
            return torch.optim.Adafactor(groups, lr=config.lr)
        case "muon":
            return _muon(model, config)
        case "adamw8bit":
            import bitsandbytes  # type: ignore[import-not-found]

            return bitsandbytes.optim.AdamW8bit(groups, lr=config.lr, betas=betas)
        case _:
            return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)


def _momentum(config: TrainConfig, usual: float) -> float:
    return usual if config.momentum is None else config.momentum


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimisers as one: their groups are shared with it, so one schedule drives both."""

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        self.members = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each."""
        assert closure is None, "a closure would be evaluated twice"
        for member in self.members:
            member.step()

    def state_dict(self) -> dict[str, Any]:
        """Of both."""
        return {"members": [member.state_dict() for member in self.members]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of both."""
        for member, state in zip(self.members, state_dict["members"], strict=True):
            member.load_state_dict(state)
        # Loading makes new groups; the schedule must go on driving those that are used.
        self.param_groups = [group for member in self.members for group in member.param_groups]


def _muon(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Muon for the matrices of hidden layers, AdamW for embeddings, head, vectors and what has more dimensions."""
    outer = {id(p) for module in _embeddings(model) for p in module.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    hidden = [p for p in trained if p.ndim == 2 and id(p) not in outer]
    if not hidden:
        raise ValueError("optimizer is muon, but no matrix of a hidden layer is trained; use adamw")
    # Updates of the size of AdamW's, so that one learning rate serves both.
    muon = torch.optim.Muon(
        hidden,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=_momentum(config, MUON_MOMENTUM),
        adjust_lr_fn="match_rms_adamw",
    )
    taken = {id(p) for p in hidden}
    rest = _groups([p for p in trained if id(p) not in taken], config.weight_decay)
    if not rest:
        return muon
    return MuonWithAdamW(muon, torch.optim.AdamW(rest, lr=config.lr, betas=(config.beta1, config.beta2), fused=True))


def _embeddings(model: nn.Module) -> list[nn.Module]:
    """The first and the last layer, and embeddings of any other kind."""
    found: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    for name in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, name)() if hasattr(model, name) else None
        found += [] if module is None else [module]
    return found
