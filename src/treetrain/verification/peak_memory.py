"""Peak memory of one training step, measured in a fresh process."""

import contextlib
import ctypes
import gc
import multiprocessing
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from treetrain.data.trajectory import Trajectory
from treetrain.engine.engine import TreeEngine
from treetrain.engine.packed import model_device
from treetrain.losses.sft import sft


def peak_step_bytes(
    engine_type: type[TreeEngine],
    options: dict[str, Any],
    model: nn.Module,
    trajectories: Sequence[Trajectory],
    loss: Any,
) -> int | None:
    """Peak bytes of one forward and backward above the model and its gradients.

    A CPU model is sent to a new process, so that nothing that ran before is counted; a CUDA model is measured here.

    Returns:
        Bytes, or None on a system whose kernel does not report a process's peak.
    """
    if model_device(model).type == "cuda":
        return _cuda_peak(engine_type(model, **options), trajectories, loss)
    if not Path("/proc/self/clear_refs").exists():
        return None
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, engine_type, options, model, list(trajectories), loss, torch.get_num_threads())
    process = context.Process(target=_measure, args=arguments)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RuntimeError(
            f"the process measuring memory ended with code {process.exitcode} (out of memory?)"
        ) from None
    finally:
        process.join()


def _measure(sender, engine_type, options, model, trajectories, loss, threads) -> None:
    torch.set_num_threads(threads)
    _prepare_gradients(model)
    _load_code(engine_type(model), model)
    engine = engine_type(model, **options)
    if not isinstance(engine.budget, int):
        engine.plan(trajectories)  # may measure what passes cost, which is no part of a step
    gc.collect()
    _return_free_memory()
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # restarts the peak
    engine.forward_backward(trajectories, loss)
    sender.send(max(_status_bytes("VmHWM") - before, 0))
    sender.close()


def _load_code(engine: TreeEngine, model: nn.Module) -> None:
    """Run a few tokens: libraries' code, which is mapped in when it first runs, is no memory of a step."""
    engine.forward_backward([Trajectory([0, 0, 0, 0]), Trajectory([0, 0, 1, 1])], sft())
    model.zero_grad(set_to_none=False)


def _return_free_memory() -> None:
    """Blocks that the C library holds on to would be used again without being seen."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _prepare_gradients(model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().sum()  # a model sent from another process is mapped in when it is first read
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.add_(0.0)  # touch every page


def _cuda_peak(engine: TreeEngine, trajectories: Sequence[Trajectory], loss: Any) -> int:
    _prepare_gradients(engine.model)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine.forward_backward(trajectories, loss)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024
