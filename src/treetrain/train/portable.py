"""The state of a run as any number of processes can take it up: tensors apart from plain data, parameters by name."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

_TENSOR = "tensor"
"""The only entry of what stands in the place of a tensor."""
SEPARATOR = "/"
"""Between the parts of a tensor's path; no name of a parameter has it."""


def take_apart(state: Any, path: str) -> tuple[Any, dict[str, Tensor]]:
    """Nested plain data and tensors.

    Args:
        state: dictionaries, lists and tuples of both.
        path: of the whole.

    Returns:
        The same with every tensor's path in its place; the tensors by path, not copied.
    """
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, at: str) -> Any:
        if isinstance(value, Tensor):
            tensors[at] = value.detach()
            return {_TENSOR: at}
        if isinstance(value, Mapping):
            return {name: walk(entry, f"{at}{SEPARATOR}{name}") for name, entry in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(walk(entry, f"{at}{SEPARATOR}{number}") for number, entry in enumerate(value))
        return value

    return walk(state, path), tensors


def put_together(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `take_apart`."""
    if isinstance(plain, dict):
        if plain.keys() == {_TENSOR}:
            return tensors[plain[_TENSOR]]
        return {name: put_together(entry, tensors) for name, entry in plain.items()}
    if isinstance(plain, list | tuple):
        return type(plain)(put_together(entry, tensors) for entry in plain)
    return plain


def by_name(state: Mapping[str, Any], optimizer: Any, model: nn.Module) -> dict[str, Any]:
    """The state of an optimiser with its parameters' names in the place of their numbers.

    Args:
        state: as the optimiser gave it.
        optimizer: over parameters of the model; or several as one, which are its `members`.
    """
    if "members" in state:
        pairs = zip(state["members"], optimizer.members, strict=True)
        return {**state, "members": [by_name(member, each, model) for member, each in pairs]}
    names = _names(optimizer, model)
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    return {
        **state,
        "state": {names[number]: entry for number, entry in state["state"].items()},
        "param_groups": groups,
    }


def by_number(state: Mapping[str, Any], optimizer: Any, model: nn.Module) -> dict[str, Any]:
    """The inverse of `by_name`, for an optimiser over the same parameters.

    Raises:
        ValueError: it has other parameters, or others together in a group.
    """
    if "members" in state:
        pairs = zip(state["members"], optimizer.members, strict=True)
        return {**state, "members": [by_number(member, each, model) for member, each in pairs]}
    names = _names(optimizer, model)
    stored = [name for group in state["param_groups"] for name in group["params"]]
    if stored != names:
        differing = sorted(set(stored) ^ set(names)) or [f"{stored[0]}, ... (in another order)"]
        raise ValueError(f"the optimiser's state is of other parameters: only one of the two has {differing[0]}")
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    states = {numbers[name]: entry for name, entry in state["state"].items()}
    return {**state, "state": states, "param_groups": groups}


def _names(optimizer: Any, model: nn.Module) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


class Places:
    """How this process holds the tensors of a state: like the parameters that they belong to.

    A parameter's name in a tensor's path says whose it is. What has its shape is sharded as it is; what has another
    one (a factored second moment) is whole on every rank; single numbers, and what belongs to no parameter, are
    ordinary tensors.

    Args:
        model: sharded or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())

    def empty(self, path: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """A place for the tensor of this path."""
        owner = self._owner(path)
        if owner is None or not size:
            return torch.empty(size, dtype=dtype)
        if size == owner.shape:
            return torch.empty_like(owner, dtype=dtype)
        return distribute_tensor(
            torch.empty(size, dtype=dtype),
            owner.device_mesh,
            [Replicate()] * owner.device_mesh.ndim,
            src_data_rank=None,
        )

    def put(self, path: str, whole: Tensor) -> Tensor:
        """A tensor that every rank has read as a whole."""
        owner = self._owner(path)
        if owner is None or not whole.shape:
            return whole
        kept = owner.placements if whole.shape == owner.shape else [Replicate()] * owner.device_mesh.ndim
        return distribute_tensor(whole, owner.device_mesh, kept, src_data_rank=None)

    def _owner(self, path: str) -> DTensor | None:
        """The sharded parameter that a tensor belongs to."""
        owners = (self._parameters.get(part) for part in path.split(SEPARATOR))
        found = next((owner for owner in owners if owner is not None), None)
        return found.detach() if isinstance(found, DTensor) else None  # type: ignore[return-value]
