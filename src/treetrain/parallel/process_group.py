"""The processes that share a step: how they agree before it, how gradients are averaged after it, and FSDP2's shards.

Ranks agree over the CPU, in small objects (whole rows only if the loss must see those of all ranks).

Why ranks cannot deadlock, whatever fails on one:

- Ranks wait for one another in `Ranks.exchange`, in collective operations of passes, and in `Ranks.gather`, where no
  data of one rank can make it fail shortly before (when an engine is made, and averages after a step).
- Every public call runs within `together`. All ranks of a group make the same exchanges in a call, since what decides
  on an exchange (settings, the kind of call) is compared in the first one. `together` ends with one more.
- A rank that fails between two exchanges makes exactly one more: `together` sends its error in place of a value. The
  others, in their next exchange, raise RanksDisagree with it. There is a next one, since `together` ends with one.
- An error that rises on all ranks at once (their settings differ) makes all of them send it: one exchange again.
- An error of the loss in the middle of passes that ranks run together is kept until these passes are over. Any other
  error there ends the group: the process marks it as lost, and the others are told why, or time out. So does an
  interrupt (Ctrl-C) anywhere, since it may come within an exchange.

DataError, ValueError, TypeError and UnsupportedModel rise where they are found, RanksDisagree on all other ranks.
"""

import datetime
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from treetrain.core.engine.ranks import Ranks
from treetrain.core.errors import RanksDisagree, UnsupportedModel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

T = TypeVar("T")
BUCKET_NUMBERS = 1 << 24
"""Most gradient entries per all-reduce; a larger parameter gets one of its own."""
_MADE: dict[Hashable, Any] = {}
"""Process groups created here, by the group or mesh that they serve; all engines on it share them."""
_ERROR = "treetrain error"
"""The key in a group's store of the error that ended a pass; the processes must start again after it."""
_CONTROL = {"timeout": datetime.timedelta(minutes=30)}
"""The longest time a rank may read, plan or evaluate while the others wait for it; see `limit_waits`."""
ANSWER_TIMEOUT = datetime.timedelta(seconds=5)
"""The longest time a rank waits, when another one has gone, for the rest to say that they are there."""
_ANSWERS = "treetrain is there/"
JOIN_TIMEOUT = datetime.timedelta(seconds=60)
"""The longest time a rank waits for the others to start."""


def wait_for_ranks() -> None:
    """Wait until all processes of a run have started; call it before the process group is made.

    torch waits half an hour for a rank that was killed before it joined. torchrun ends all processes when one fails,
    but not when one ends as if it were done.

    Raises:
        RanksDisagree: some did not come within `JOIN_TIMEOUT`; the message names them.
        ValueError: the environment names no rank of a run, or only some of what names it.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not dist.is_available() or dist.is_initialized():
        return
    given, absent = ([name for name in names if (name in os.environ) is there] for there in (True, False))
    if given and absent and "LOCAL_RANK" in os.environ:  # accelerate would fill in others and wait for ever
        raise ValueError(
            f"the environment has LOCAL_RANK and {', '.join(given)}, but not {', '.join(absent)}: start the processes "
            "with torchrun, which sets them all, or unset LOCAL_RANK"
        )
    if absent or _number("WORLD_SIZE", 1) < 2:
        return
    size, address = _number("WORLD_SIZE", 1), os.environ["MASTER_ADDR"]
    rank, port = _number("RANK", 0, size - 1), _number("MASTER_PORT", 0, 65535)
    store, missing = None, f"rank 0, which the others meet at {address}:{port}"
    torchrun_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # torchrun's store outlives a restart. If rank 0 serves, it is new; a host that came back counts from 0 again.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT") if torchrun_serves else None
    keys = [f"treetrain/{restarts}/{other}" for other in range(size)]
    try:
        # The process group's own store shares the server of this one, which must stay.
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            address,
            port,
            size,
            rank == 0 and not torchrun_serves,
            timeout=JOIN_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
        )
        _MADE["store of wait_for_ranks"] = store
        store.set(keys[rank], "started")
        store.wait(keys, JOIN_TIMEOUT)
    except RuntimeError as error:
        with suppress(RuntimeError):
            if store is not None:
                missing = ", ".join(f"rank {other}" for other in range(size) if not store.check([keys[other]]))
        try:
            socket.getaddrinfo(address, port)
        except (OSError, UnicodeError):
            missing = f"rank 0 at MASTER_ADDR={address!r}, a name that no host has"
        raise RanksDisagree(
            f"rank {rank} of {size} has waited {JOIN_TIMEOUT.total_seconds():g} s for {missing or 'the others'}: not "
            "started, or killed before it joined; see what it said, and start all processes again"
        ) from error


def limit_waits(seconds: float) -> None:
    """Make collective calls on the CPU fail after so many seconds, in all process groups that this process has.

    transformers passes `ddp_timeout` to torch where there is a GPU, not with `use_cpu`, and groups made beside the
    first one have torch's half an hour.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    _CONTROL["timeout"] = timeout = datetime.timedelta(seconds=seconds)
    for group in list(dist.distributed_c10d._world.pg_map):
        if "cpu" in str(dist.get_backend_config(group)):
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def _number(name: str, least: int, most: int | None = None) -> int:
    """A whole number in a variable of the environment. Raises ValueError."""
    text = os.environ[name]
    value = int(text) if text.isascii() and text.isdecimal() else -1
    if value < least or (most is not None and value > most):
        span = f"from {least} on" if most is None else f"from {least} to {most}"
        raise ValueError(f"the environment has {name}={text!r}; give a whole number {span}")
    return value


class GroupRanks(Ranks):
    """The processes of one group, this one among them.

    Args:
        group: a torch.distributed group; None makes a group of this process alone.
        same_rows: the processes among them that hold the same rows as this one; None if each has its own.

    Raises:
        UnsupportedModel: the group cannot be divided into such ranks.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None, same_rows: Ranks | None = None):
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank, self.alone = 0 if group is None else dist.get_rank(group), self.size == 1
        self.lost = False
        self._calls: list[str] = []
        self._sets = [(rank,) for rank in range(self.size)]
        if same_rows is not None and not same_rows.alone:
            members = dist.get_process_group_ranks(self.group)
            found = sorted(set(self.gather(tuple(dist.get_process_group_ranks(same_rows.group)))))
            if sorted(member for own in found for member in own) != sorted(members):
                raise UnsupportedModel(
                    f"the ranks {members} share a step, which the context-parallel groups {found} do not divide among "
                    "them: every process of a context group must be in group=, in DistributedDataParallel's group, or "
                    "on the mesh of fully_shard (flattened, or with the context as one of its two dimensions)."
                )
            self._sets = [tuple(members.index(member) for member in own) for own in found]
        self.data_rank = next(number for number, own in enumerate(self._sets) if self.rank in own)
        self.data_size = len(self._sets)

    def per_data_rank(self, values: Sequence[T]) -> list[T]:
        return [values[own[0]] for own in self._sets]

    @cached_property
    def _control(self) -> "dist.ProcessGroup | None":
        """A group whose collectives take CPU tensors, so that no device waits for a few numbers."""
        assert self.group is not None
        if "cpu" in str(dist.get_backend_config(self.group)):
            return self.group
        members = dist.get_process_group_ranks(self.group)
        return _made_once(self.group, members, backend="gloo", timeout=_CONTROL["timeout"])

    def gather(self, value: T) -> list[T]:
        if self.alone:
            return [value]
        if self.lost:
            raise RuntimeError(
                "an earlier step failed in the middle of a pass of this rank, so the ranks are no longer in step; "
                "start all processes again (from their last checkpoint)"
            )
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._control)
        except RuntimeError as error:
            self.leave(error)
            raise
        return values

    def leave(self, error: BaseException) -> None:
        assert self.group is not None
        self.lost = True
        # The others may be in any collective call, where no message reaches them. The group's store needs none: the
        # rank that fails first writes there why, and those that fail for its absence read it.
        store: Any = self.group.get_group_store()
        if not _was_left_by_others(error):
            store.set(_ERROR, f"rank {self.rank} of {self.size}: {type(error).__name__}: {error}")
            error.add_note("it came in the middle of a pass: the other ranks wait there until this process ends")
            return
        raise RanksDisagree(
            "another rank has left this pass, by an error of its own, or because its process or the network to it "
            f"ended: {self._gone}"
        ) from error

    def explain(self, error: BaseException) -> None:
        assert self.group is not None
        if _was_left_by_others(error):
            error.add_note(f"another rank has left this collective call: {self._gone}")

    @cached_property
    def _gone(self) -> str:
        """Why the others failed, and the ranks that do not answer by the group's store, in words.

        Over a cut cable torch waits for a store without a timeout. So a thread asks, which may stay behind.
        """
        answer: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._ask, args=(answer,), daemon=True).start()
        with suppress(queue.Empty):
            return answer.get(timeout=2 * ANSWER_TIMEOUT.total_seconds())
        return "the process that holds the ranks' store (rank 0, or torchrun) does not answer"

    def _ask(self, answer: "queue.SimpleQueue[str]") -> None:
        assert self.group is not None
        store: Any = self.group.get_group_store()
        silent, until = [], time.monotonic() + ANSWER_TIMEOUT.total_seconds()
        try:
            said = store.get(_ERROR).decode() if store.check([_ERROR]) else "see what it said"
            store.set(f"{_ANSWERS}{self.rank}", "")
            for rank in range(self.size):
                left = datetime.timedelta(seconds=max(until - time.monotonic(), 0.1))
                try:
                    store.wait([f"{_ANSWERS}{rank}"], left)
                except dist.DistStoreError:
                    silent.append(rank)
        except RuntimeError:
            answer.put("the process that holds the ranks' store has ended (rank 0, or torchrun)")
            return
        seconds = f"within {ANSWER_TIMEOUT.total_seconds():g} s"
        named = (
            f"no answer {seconds} from rank {', '.join(map(str, silent))} of {self.size}" if silent else "all answer"
        )
        answer.put(f"{said}; {named}")

    @contextmanager
    def together(self, call: str) -> Iterator[None]:
        """See `Ranks.together`, and ``core/engine/ranks.py`` for why no rank waits for ever."""
        if self.alone:
            yield
            return
        self._calls.append(call)
        try:
            yield
            self.exchange(None)
        except Exception as error:
            if not self.lost and not self._knows(error):
                self.gather((call, f"{type(error).__name__}: {error}", None))
            if len(self._calls) == 1:  # the same object may be raised again in a later call
                vars(error).get("_known_to", set()).discard(id(self))
            raise
        except (KeyboardInterrupt, SystemExit) as error:
            # It may have come within an exchange, so this process cannot know which of them the others are in.
            if not self.lost:
                with suppress(RuntimeError):
                    self.leave(error)
            raise
        finally:
            self._calls.pop()

    def exchange(self, value: T) -> list[T]:
        if self.alone:
            return [value]
        call = self._calls[-1]
        answers = self.gather((call, None, value))
        failed = [(rank, error) for rank, (_, error, _) in enumerate(answers) if error is not None]
        if failed:
            rank, error = failed[0]
            others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            stopped = RanksDisagree(
                f"{call} stopped on all ranks, because of rank {rank} of {self.size}{others}: {error}"
            )
            self._knows(stopped)
            raise stopped
        check_same("the call", [other for other, _, _ in answers])
        return [sent for _, _, sent in answers]

    def same(self, settings: dict[str, object]) -> None:
        answers = self.exchange(settings)
        for name in settings:
            check_same(name, [answer[name] for answer in answers])

    def _knows(self, error: Exception) -> bool:
        """Whether these ranks know of an error already; they do from now on."""
        known_to = vars(error).setdefault("_known_to", set())  # of numbers, so that the error can be pickled
        known = id(self) in known_to
        known_to.add(id(self))
        return known

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gradients of 16 bits are added up in float32."""
        if self.alone:
            return
        masks = self.gather([p.grad is not None for p in parameters])
        present = [p for p, *has in zip(parameters, *masks) if any(has)]
        for bucket in _buckets(present):
            wide = torch.promote_types(bucket[0].dtype, torch.float32)
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([grad.flatten().to(wide) for grad in grads])
            dist.all_reduce(flat, group=self.group)
            flat /= self.size
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                if p.grad is None:
                    p.grad = torch.empty_like(p, requires_grad=False)
                p.grad.detach().copy_(part.view_as(p))  # in place, for whoever holds the tensor


CALL = "make the same calls with the same settings (their rows alone may differ)"


def check_same(name: str, values: Sequence[object], must: str = CALL) -> None:
    """Raise RanksDisagree, which says what ranks must do, unless all of them have the same value."""
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise RanksDisagree(
            f"the ranks differ in {name}: rank 0 has {values[0]!r}, rank {other} {values[other]!r}; all of them must "
            f"{must}"
        )


def _was_left_by_others(error: BaseException) -> bool:
    """Whether a collective failed because of another rank, by the messages of torch's backends."""
    words = ("closed by peer", "reset by peer", "imed out", "NCCL", "Broken pipe", "unreachable", "No route to host")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(w in str(error) for w in words)
    )


def _made_once(
    key: Hashable, members: list[int], backend: str | None = None, timeout: datetime.timedelta | None = None
) -> "dist.ProcessGroup":
    if key not in _MADE:
        # With local synchronization, torch names a group by how many groups each member has, which may differ between
        # members. A group of all ranks does not need it.
        some = len(members) != dist.get_world_size()
        _MADE[key] = dist.new_group(members, timeout=timeout, backend=backend, use_local_synchronization=some)
    return _MADE[key]


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one dtype and device, in the buckets that are reduced together."""
    kinds: dict[Hashable, list[list[nn.Parameter]]] = {}
    for p in parameters:
        buckets = kinds.setdefault((p.dtype, p.device), [[]])
        if sum(q.numel() for q in buckets[-1]) + p.numel() > BUCKET_NUMBERS and buckets[-1]:
            buckets.append([])
        buckets[-1].append(p)
    return [bucket for buckets in kinds.values() for bucket in buckets]


def unwrapped(model: nn.Module, group: "dist.ProcessGroup | None") -> "tuple[nn.Module, dist.ProcessGroup | None]":
    """The model within a `DistributedDataParallel` or a DeepSpeedEngine, and its group if none is given.

    Other models are returned as they are. `Ranks.average_gradients` does once per step what the wrapper does in a
    backward.
    """
    if is_deepspeed_engine(model):
        return model.module, dist.group.WORLD if group is None else group  # type: ignore[return-value]
    if dist.is_available():
        from torch.nn.parallel import DistributedDataParallel

        if isinstance(model, DistributedDataParallel):
            return model.module, model.process_group if group is None else group
    return model, group


def is_deepspeed_engine(model: nn.Module) -> bool:
    """Whether a model is wrapped by DeepSpeed."""
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine)


# ---- ZeRO-3


def is_partitioned(weight: object) -> bool:
    """Whether DeepSpeed's ZeRO-3 has divided a weight over ranks."""
    return hasattr(weight, "ds_tensor")


@contextmanager
def whole_shapes(model: nn.Module) -> Iterator[None]:
    """Inside the block, partitioned weights have the shapes of whole ones, without memory; do not read them."""
    parameters: Sequence[Any] = [p for p in model.parameters() if is_partitioned(p)]
    before = [p.data for p in parameters]
    for p in parameters:
        p.data = p.data.new_empty(1).expand(p.ds_shape)
    try:
        yield
    finally:
        for p, data in zip(parameters, before):
            p.data = data


# ---- FSDP2


def is_shard(tensor: object) -> bool:
    """Whether a tensor is one rank's part of a larger one."""
    return hasattr(tensor, "device_mesh") or is_partitioned(tensor)


def meshes_of(*modules: nn.Module | None) -> "list[DeviceMesh]":
    """The device meshes that weights of these modules lie on, each once."""
    weights: Any = (parameter for module in modules if module is not None for parameter in module.parameters())
    return list(dict.fromkeys(parameter.device_mesh for parameter in weights if hasattr(parameter, "device_mesh")))


def whole_tensor(shard: Any) -> Tensor:
    """The tensor that the ranks hold shards of, on its mesh's device; a collective call."""
    kind = shard.device_mesh.device_type
    return (shard if shard.device.type == kind else shard.to(kind)).full_tensor()  # one that is offloaded moves there


def sharded_modules(*modules: nn.Module | None) -> list[Any]:
    """The modules within these that FSDP2 (`fully_shard`) has sharded, each once."""
    if not dist.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    within = dict.fromkeys(inner for module in modules if module is not None for inner in module.modules())
    return [module for module in within if isinstance(module, FSDPModule)]


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has sharded some of a model's modules, or ZeRO-3 its weights."""
    return bool(sharded_modules(model)) or any(map(is_partitioned, model.parameters()))


def output_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype that FSDP2 casts a model's output to by its mixed precision policy; None if it does not."""
    if model not in sharded_modules(model):
        return None
    policy = getattr(model._get_fsdp_state(), "_mp_policy", None)  # type: ignore[operator]
    return getattr(policy, "output_dtype", None)


def parameter_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype that FSDP2 casts a model's weights to by its mixed precision policy; None if it does not."""
    shards = sharded_modules(model)
    policy = getattr(shards[0]._get_fsdp_state(), "_mp_policy", None) if shards else None
    return getattr(policy, "param_dtype", None)


def compute_dtype(model: nn.Module, device: torch.device, parameters: Iterable[Tensor] | None = None) -> torch.dtype:
    """The dtype of the arithmetic: autocast's if it is enabled, else that of FSDP2's policy, else the weights'."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    if any(hasattr(p, "device_mesh") for p in (model.parameters() if parameters is None else parameters)):
        return parameter_dtype(model) or model.dtype  # type: ignore[return-value]
    return model.dtype  # type: ignore[return-value]


@contextmanager
def reduced_at_once(model: nn.Module) -> Iterator[None]:
    """Inside the block, every backward of a sharded model reduces its gradients, even within an accumulation."""
    before = [
        (module, all(group.reduce_grads for group in _parameter_groups(module))) for module in sharded_modules(model)
    ]
    for module, _ in before:
        module.set_requires_gradient_sync(True, recurse=False)
    try:
        yield
    finally:
        for module, reduces in before:
            module.set_requires_gradient_sync(reduces, recurse=False)


def waiting_gradients(*modules: nn.Module | None) -> list[Any]:
    """FSDP2's objects for weights whose gradients are not reduced yet, and so not in ``.grad``."""
    groups = (group for module in sharded_modules(*modules) for group in _parameter_groups(module))
    return [
        weight
        for group in groups
        for weight in group.fsdp_params
        if weight.unsharded_accumulated_grad is not None
        or getattr(getattr(weight, "_unsharded_param", None), "grad", None) is not None
    ]


def drop_waiting_gradients(*modules: nn.Module | None) -> None:
    """Drop gradients that are not reduced yet: the next reduction would add them to another step."""
    for weight in waiting_gradients(*modules):
        if (whole := getattr(weight, "_unsharded_param", None)) is not None:
            whole.grad = None
        # From torch 2.15 on this is a view of the gradient above and cannot be set; before, it is a tensor beside it.
        if weight.unsharded_accumulated_grad is not None:
            weight.unsharded_accumulated_grad = None


def _parameter_groups(module: "FSDPModule") -> list[Any]:
    """The groups of weights that FSDP2 gathers and reduces together; none for a module without its own weights."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def ranks_of(
    model: nn.Module, group: "dist.ProcessGroup | None", value_head: nn.Module | None, same_rows: Ranks
) -> Ranks:
    """The ranks that share a model's steps.

    Args:
        group: the group whose gradients are averaged; None takes the ranks of a sharded model, or else the ranks with
            the same rows.
        value_head: unsharded, or sharded over the same ranks as the model.
        same_rows: the ranks that hold the same rows as this one.

    Raises:
        UnsupportedModel: weights sharded over another group or over several.
    """
    if not dist.is_available() or not dist.is_initialized():
        return Ranks()
    if group is not None and dist.get_rank(group) < 0:
        raise UnsupportedModel(f"rank {dist.get_rank()} is not in the group given; give it one that it belongs to.")
    if value_head is not None and is_sharded(value_head) and not is_sharded(model):
        raise UnsupportedModel(
            "the value head is sharded (fully_shard), the model is not; shard the model too, or leave the value head "
            "whole."
        )
    name, shards = type(model).__name__, sharded_modules(model, value_head)
    if not shards:
        group = dist.group.WORLD if group is None and is_sharded(model) else group  # ZeRO-3 divides over all
        return GroupRanks(same_rows.group if group is None else group, same_rows)
    meshes = meshes_of(model, value_head)
    if len(meshes) != 1:
        raise UnsupportedModel(
            f"the weights of {name} lie on {len(meshes)} device meshes (tensor parallel beside FSDP, or layers left "
            "out of fully_shard): every rank would hold another part of the model; call fully_shard with one mesh on "
            "its layers and then on the model itself."
        )
    parts = (part for module in shards for part in _parameter_groups(module))
    if any(getattr(part, "gradient_divide_factor", None) is not None for part in parts):
        raise UnsupportedModel(
            "set_gradient_divide_factor was called on the model: its gradients would not be those of the step, which "
            "is scaled for FSDP2's own average over ranks; leave it as it is."
        )
    mesh = meshes[0]
    if mesh.ndim == 1:
        whole = mesh.get_group()
    elif mesh.size() == dist.get_world_size():  # shards within replicas
        whole = dist.group.WORLD
    else:
        whole = _made_once(tuple(mesh.get_all_groups()), mesh.mesh.flatten().tolist())
    if group is not None and set(dist.get_process_group_ranks(group)) != set(dist.get_process_group_ranks(whole)):
        raise UnsupportedModel(
            "the group given is not that of the model's shards; leave it out, and the ranks of the mesh share a step."
        )
    return GroupRanks(whole, same_rows)
