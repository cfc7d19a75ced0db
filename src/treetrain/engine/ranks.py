"""The processes that share a step: who they are, and what they tell each other before and after it.

What is told here goes over the CPU, in objects of a few kilobytes; tensors of weights and gradients are left to
torch's own machinery.
"""

import datetime
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from treetrain.errors import RanksDisagree, UnsupportedModel

T = TypeVar("T")
BUCKET_NUMBERS = 1 << 24
"""Gradients that one all-reduce takes at once."""
_MADE: dict[Any, Any] = {}
"""Groups made here for others: every engine on the same ones talks over the same."""
CONTROL_TIMEOUT = datetime.timedelta(minutes=30)
"""A rank may read, plan and evaluate for so long while the others wait for it."""


class Ranks:
    """The processes of one group, this one among them.

    Args:
        group: as torch made it; None: this process alone.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None):
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.lost = False
        """Whether this process left a pass that the others wait in, so that nothing can be told them any more."""

    @property
    def alone(self) -> bool:
        """Whether there is nobody to talk to."""
        return self.size == 1

    @cached_property
    def _control(self) -> "dist.ProcessGroup | None":
        """A group whose collectives take CPU tensors, so that no device waits for a few numbers."""
        assert self.group is not None
        if "cpu" in str(dist.get_backend_config(self.group)):
            return self.group
        members = dist.get_process_group_ranks(self.group)
        return _made_once(self.group, members, backend="gloo", timeout=CONTROL_TIMEOUT)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank; a collective call."""
        if self.alone:
            return [value]
        if self.lost:
            raise RuntimeError(
                "an earlier step failed in the middle of a pass of this rank, so the ranks are no longer in step; "
                "start all processes again (from their last checkpoint)"
            )
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._control)
        return found

    def agree(self, what: str, make: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """Make something on every rank, and what each wants the others to know of it.

        Returns:
            this rank's own, and what every rank has told, by rank.

        Raises:
            RanksDisagree: another rank could not make it.
            Exception: this one could not: what `make` raised, when the others know.
        """
        if self.alone:
            made, told = make()
            return made, [told]
        try:
            made, told = make()
        except RanksDisagree:
            raise  # all ranks know of it
        except Exception as error:
            if not self.lost:
                self.gather((what, _described(error), None))
            raise
        found = self.gather((what, None, told))
        failed = [(rank, error) for rank, (_, error, _) in enumerate(found) if error is not None]
        if failed:
            rank, error = failed[0]
            others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            raise RanksDisagree(f"{what} stopped on all ranks, because of rank {rank} of {self.size}{others}: {error}")
        check_same("the call", [call for call, _, _ in found])
        return made, [told for _, _, told in found]

    def average_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Replace every gradient by its mean over the ranks; one that no rank has stays away.

        Gradients of 16 bits are added up in float32.
        """
        if self.alone:
            return
        masks = self.gather([p.grad is not None for p in parameters])
        present = [p for p, *has in zip(parameters, *masks) if any(has)]
        for bucket in _buckets(present):
            wide = torch.promote_types(bucket[0].dtype, torch.float32)
            flat = torch.cat([_gradient(p).flatten().to(wide) for p in bucket])
            dist.all_reduce(flat, group=self.group)
            flat /= self.size
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = part.view_as(p).to(p.dtype, copy=True)


def check_same(name: str, values: list[Any]) -> None:
    """Raise RanksDisagree unless all ranks have told the same."""
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise RanksDisagree(
            f"the ranks differ in {name}: rank 0 has {values[0]!r}, rank {other} {values[other]!r}; all of them must "
            "make the same calls with the same settings (their rows alone may differ)"
        )


def was_left_by_others(error: BaseException) -> bool:
    """Whether a collective failed because of another rank, as torch's backends say it."""
    told = ("closed by peer", "reset by peer", "Timed out waiting", "NCCL", "Broken pipe")
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(w in str(error) for w in told))


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _made_once(key: Any, members: list[int], **options: Any) -> Any:
    if key not in _MADE:
        # A group that its members make by themselves is named by how many each has made: of all, where that can be.
        some = len(members) != dist.get_world_size()
        _MADE[key] = dist.new_group(members, use_local_synchronization=some, **options)
    return _MADE[key]


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one kind whose gradients go together."""
    kinds: dict[Any, list[list[nn.Parameter]]] = {}
    for p in parameters:
        buckets = kinds.setdefault((p.dtype, p.device), [[]])
        if sum(q.numel() for q in buckets[-1]) + p.numel() > BUCKET_NUMBERS and buckets[-1]:
            buckets.append([])
        buckets[-1].append(p)
    return [bucket for buckets in kinds.values() for bucket in buckets]


def unwrapped(model: nn.Module, group: "dist.ProcessGroup | None") -> "tuple[nn.Module, dist.ProcessGroup | None]":
    """The model within a `DistributedDataParallel`, and whose gradients are to be one; others as they are.

    What it does in a backward is done once per step here, by `Ranks.average_gradients`.
    """
    if not dist.is_available():
        return model, group
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        return model, group
    return model.module, model.process_group if group is None else group


def is_shard(tensor: Any) -> bool:
    """Whether a tensor is one rank's part of a larger one."""
    return hasattr(tensor, "device_mesh")


def sharded_modules(*modules: nn.Module | None) -> list[Any]:
    """Those within some modules that are in the hands of FSDP2 (`fully_shard`), each once."""
    if not dist.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    within = dict.fromkeys(inner for module in modules if module is not None for inner in module.modules())
    return [module for module in within if isinstance(module, FSDPModule)]


def is_sharded(model: nn.Module) -> bool:
    """Whether some of a model's modules are in the hands of FSDP2."""
    return bool(sharded_modules(model))


def output_dtype(model: nn.Module) -> torch.dtype | None:
    """What FSDP2 casts a model's output to, by its mixed precision policy; None: it leaves it."""
    if model not in sharded_modules(model):
        return None
    policy = getattr(model._get_fsdp_state(), "_mp_policy", None)  # type: ignore[operator]
    return getattr(policy, "output_dtype", None)


def waiting_gradients(*modules: nn.Module | None) -> list[Any]:
    """FSDP2's own records of the weights whose gradients have not been reduced yet: no ``.grad`` shows them."""
    groups = (group for module in sharded_modules(*modules) for group in _parameter_groups(module))
    return [
        held
        for group in groups
        for held in group.fsdp_params
        if held.unsharded_accumulated_grad is not None or getattr(_whole(held), "grad", None) is not None
    ]


def drop_waiting_gradients(*modules: nn.Module | None) -> None:
    """Forget them: the next reduction would add them to another step."""
    for held in waiting_gradients(*modules):
        held.unsharded_accumulated_grad = None
        if (whole := _whole(held)) is not None:
            whole.grad = None


def _whole(held: Any) -> Any:
    return getattr(held, "_unsharded_param", None)


def ranks_of(model: nn.Module, group: "dist.ProcessGroup | None", value_head: nn.Module | None = None) -> Ranks:
    """The ranks that share a model's steps.

    Args:
        group: whose gradients are to be one; None: those that a sharded model is spread over, else this process alone.
        value_head: beside the model; whole, or in shards over the same ranks as the model.

    Raises:
        UnsupportedModel: weights in shards of another group or of several, or shards by rows of matrices (tensor
            parallel).
    """
    _refuse_tensor_parallel(model)
    if not dist.is_available() or not dist.is_initialized():
        return Ranks()
    if group is not None and dist.get_rank(group) < 0:
        raise UnsupportedModel(f"rank {dist.get_rank()} is none of the group given; give it one that it belongs to.")
    if value_head is not None and is_sharded(value_head) and not is_sharded(model):
        raise UnsupportedModel(
            "the value head is in shards (fully_shard), the model is not: every pass would have to be one of all "
            "ranks; shard the model too, or leave the value head whole."
        )
    meshes = _meshes(model, value_head)
    if not is_sharded(model):
        if meshes:
            raise UnsupportedModel(
                f"the weights of {type(model).__name__} are DTensors that fully_shard did not make (tensor parallel?): "
                "a rank then holds some heads or rows of every layer only, which is not supported; use fully_shard or "
                "the same whole model on every rank."
            )
        return Ranks(group)
    if len(meshes) != 1:
        raise UnsupportedModel(
            f"the weights of {type(model).__name__} lie on {len(meshes)} device meshes (tensor parallel beside FSDP, "
            "or layers left out of fully_shard): every rank would hold another part of the model; call fully_shard "
            "with one mesh on its layers and then on the model itself."
        )
    if any(_divides(module) for module in sharded_modules(model, value_head)):
        raise UnsupportedModel(
            "set_gradient_divide_factor was called on the model: its gradients would not be those of the step, which "
            "is scaled for FSDP2's own average over ranks; leave it as it is."
        )
    whole = _group_of(meshes[0])
    if group is not None and set(dist.get_process_group_ranks(group)) != set(dist.get_process_group_ranks(whole)):
        raise UnsupportedModel(
            "the group given is not that of the model's shards; leave it out, and the ranks of the mesh share a step."
        )
    return Ranks(whole)


def _refuse_tensor_parallel(model: nn.Module) -> None:
    """Models that transformers has cut by a `tp_plan`; some of them hold plain tensors, with hooks that communicate."""
    cut = next((module for module in model.modules() if (getattr(module, "_tp_size", None) or 1) > 1), None)
    if cut is not None:
        raise UnsupportedModel(
            f"{type(cut).__name__} is tensor parallel over {cut._tp_size} ranks (transformers' tp_plan): each of them "
            "holds some heads of every layer and some rows of the LM head, and all would have to run the same rows by "
            "the same plan, which is not supported; load the model without tp_plan, and use fully_shard or the same "
            "whole model on every rank."
        )


def _divides(module: Any) -> bool:
    """Whether FSDP2 was told to divide a module's gradients by something else than the number of ranks."""
    return any(getattr(group, "gradient_divide_factor", None) is not None for group in _parameter_groups(module))


def _parameter_groups(module: Any) -> list[Any]:
    """What FSDP2 gathers and reduces at once, of one of its modules; none where that has no weights of its own."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _meshes(*modules: nn.Module | None) -> list[Any]:
    """The device meshes that weights lie on, each once."""
    from torch.distributed.tensor import DTensor

    meshes: list[Any] = []
    for p in (p for module in modules if module is not None for p in module.parameters()):
        mesh = p.device_mesh if isinstance(p, DTensor) else None
        if mesh is not None and mesh not in meshes:
            meshes.append(mesh)
    return meshes


def _group_of(mesh: Any) -> "dist.ProcessGroup":
    """All ranks of a mesh of one dimension (FSDP), or of two (shards within replicas)."""
    if mesh.ndim == 1:
        return mesh.get_group()
    everyone = dist.group.WORLD
    assert everyone is not None
    if mesh.size() == dist.get_world_size():
        return everyone
    return _made_once(tuple(mesh.get_all_groups()), mesh.mesh.flatten().tolist())
