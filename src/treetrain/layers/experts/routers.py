"""Mixtures of experts: finds a model's routers and checks that they are exact on a tree.

Routers and experts act on every token independently, so they are exact on a packed tree unless a router draws random
numbers or experts drop tokens beyond a capacity. ``layers/experts/experts.py`` has what needs more: the auxiliary
loss, which covers all tokens of all rows, and recorded choices of experts.
"""

import re
import sys
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedConfig

from treetrain.core.errors import UnsupportedModel
from treetrain.core.hf.capability import Capabilities, SpecialLayers, causal_lm
from treetrain.core.hf.tree_mode import instance_of

_LOSS = "load_balancing_loss_func"
"""The name of the auxiliary loss function in a model's own file in transformers."""
_WRAPPED = re.compile(r"\.(original_module|base_layer|modules_to_save\.[^.]+)(?=\.|$)")
"""The names that an adapter inserts into a module's path."""


class Router(NamedTuple):
    """A module that chooses experts."""

    module: nn.Module
    name: str
    """The path in the model without an adapter."""
    place: int
    """The index of its layer among the layers with experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureOfExperts(SpecialLayers):
    """The experts of a model, as far as the engine needs to know them."""

    routers: tuple[Router, ...]
    places: int
    """Number of layers with experts."""
    layer_numbers: tuple[int, ...]
    """Numbers of the decoder layers with experts."""
    layers: int
    """Number of all decoder layers."""
    experts: int | None
    """Number of experts to choose from; None if the routers do not agree on one."""
    top_k: int | None
    """Number of experts per token; None if the routers do not agree on one."""
    auxiliary: float
    """The coefficient of the model's auxiliary loss; 0 if it adds none."""

    @property
    def loss_name(self) -> str:  # type: ignore[override]
        return (
            "the routers' auxiliary loss, which the model's configuration asks for (output_router_logits=True, "
            f"router_aux_loss_coef={self.auxiliary:g})"
        )

    @property
    def ambiguous(self) -> bool:
        """Whether a layer chooses experts more than once (JetMoe): tools do not agree on the order of such choices."""
        return len(set(self.layer_numbers)) < self.places


def experts_of(capabilities: Capabilities) -> MixtureOfExperts | None:
    """The model's experts; None for a model without any."""
    return instance_of(MixtureOfExperts, capabilities.special)


def check_experts(model: nn.Module, config: PreTrainedConfig) -> MixtureOfExperts | None:
    """The model's experts; None for a model without any.

    Raises:
        UnsupportedModel: routing is random, drops tokens, or is by a module that is not recognised.
    """
    lm = causal_lm(model)
    routers = _routers(lm)
    expert_modules = [name for name, module in lm.named_modules() if _holds_experts(module)]
    if not routers:
        if expert_modules:
            raise UnsupportedModel(
                f"{expert_modules[0]} belongs to a mixture of experts whose router {type(lm).__name__} does not name "
                "(no `router_logits` among the outputs it records, and no router beside the experts); such experts "
                "are not supported."
            )
        return None
    _check_routing(lm, routers)
    names = list(dict.fromkeys(router.name for router in routers))
    numbers = [re.findall(r"\.(\d+)\.", name) for name in names]
    return MixtureOfExperts(
        routers=tuple(routers),
        places=len(names),
        layer_numbers=tuple(int(found[0]) if found else -1 for found in numbers),
        layers=config.num_hidden_layers,
        experts=_agreed(routers, "num_experts"),
        top_k=_agreed(routers, "top_k"),
        auxiliary=_auxiliary(lm, config),
    )


def _routers(lm: nn.Module) -> list[Router]:
    """The modules whose output the model calls router logits, in the order of its layers.

    Where the release of transformers does not name them for a family, the modules called routers beside experts.
    """
    specs: list[object] = []
    for module in lm.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        specs += recorded if isinstance(recorded, list | tuple) else [] if recorded is None else [recorded]
    named = list(lm.named_modules())
    found = [
        (_WRAPPED.sub("", name), module) for name, module in named if any(_is_recorded(s, name, module) for s in specs)
    ]
    if not found:
        plain = [(_WRAPPED.sub("", name), module) for name, module in named]
        parents = {name.rpartition(".")[0] for name, module in plain if _holds_experts(module)}
        beside = [(name, module) for name, module in plain if name.rpartition(".")[0] in parents]
        found = [(name, module) for name, module in beside if "router" in type(module).__name__.lower()]
    places = {name: place for place, name in enumerate(dict.fromkeys(name for name, _ in found))}
    return [Router(module, name, places[name]) for name, module in found]


def _is_recorded(spec: object, name: str, module: nn.Module) -> bool:
    kind = spec if isinstance(spec, type) else getattr(spec, "target_class", None)
    suffix = spec if isinstance(spec, str) else getattr(spec, "class_name", None)
    if not (kind is not None and isinstance(module, kind)) and not (suffix and name.endswith(suffix)):
        return False
    within = getattr(spec, "layer_name", None)
    return within is None or f".{within.strip('.')}." in f".{_WRAPPED.sub('', name)}."


def _holds_experts(module: nn.Module) -> bool:
    return "experts" in type(module).__name__.lower()


def _check_routing(lm: nn.Module, routers: list[Router]) -> None:
    """Refuse routers that draw random numbers, and experts that drop tokens."""
    for name, module in lm.named_modules():
        for field, value in vars(module).items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                continue
            if "jitter" in field and module.training:
                raise UnsupportedModel(
                    f"{name} ({type(module).__name__}) has {field}={value} in training mode: a shared token would get "
                    "one noise where every row has its own. Set it to 0 or call model.eval()."
                )
            if "capacity" in field:
                raise UnsupportedModel(
                    f"{name} ({type(module).__name__}) has {field}={value}: experts that drop tokens beyond a capacity "
                    "treat a token by what else is in the call; such experts are not supported."
                )
    for router in routers:
        if router.module.training and hasattr(sys.modules[type(router.module).__module__], "sparsemixer"):
            raise UnsupportedModel(
                f"{router.name} ({type(router.module).__name__}) draws experts at random in training mode; a shared "
                "token would get one draw where every row has its own. Call model.eval()."
            )


def _agreed(routers: list[Router], field: str) -> int | None:
    """Return the integer that all routers have under this name; None if they differ or lack it."""
    values = {getattr(router.module, field, None) for router in routers}
    value = values.pop()
    return value if not values and isinstance(value, int) else None


def _auxiliary(lm: nn.Module, config: PreTrainedConfig) -> float:
    """Return the coefficient of the auxiliary loss that the model's own forward would add."""
    if not getattr(config, "output_router_logits", False):
        return 0.0
    if not any(hasattr(sys.modules.get(kind.__module__), _LOSS) for kind in type(lm).__mro__):
        return 0.0
    for holder in (lm, config):
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            if hasattr(holder, name):
                return float(getattr(holder, name) or 0.0)
    raise UnsupportedModel(
        f"output_router_logits=True: {type(lm).__name__} adds an auxiliary loss of its routers, whose coefficient is "
        "kept under a name that is unknown here; set config.output_router_logits=False to train without it."
    )
