"""All that `share_prefixes` puts in the place of something else: by whom, and until when.

| replaced | by | set in | until |
| --- | --- | --- | --- |
| ``forward`` of the model, ``_call_impl`` if it is sharded | `TreeForward` | `PrefixSharing` | the model goes |
| TRL's ``forward`` beneath an adapter | `OwnForward` | `PrefixSharing`, `LastStates` | the model goes |
| ``__class__`` of the trainer | a subclass with `SharesPrefixes` | `share_prefixes` | the trainer goes |
| a hook before every optimizer's step is added | `before_steps` | `PrefixSharing`, on ranks | the trainer goes |
| ``.grad`` of parameters | `DeferredGradient` | the loss's backward | the tree's backward, or `zero_grad` |
| DeepSpeed's hooks on gradients | nothing | `zero_processes.py`, in the first step | the model goes |
| accelerate's wrapper of DeepSpeed | `TreesFirst` | `zero_processes.py`, in the first step | the trainer goes |

Copies and pickles of the model have the forward that was there before. Whatever else is set is set by a ``with
replaced(...)``, and restored at the end of its block.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Trainer

from treetrain.core.hf.capability import causal_lm
from treetrain.trainers.batches import ModelInputs
from treetrain.trainers.step_scores import StepScores

FUSED_SETTINGS = ("temperature", "cast_lm_head_to_fp32", "outputs")
"""The settings of TRL's `add_fused_lm_head`."""


class Answers(Protocol):
    """Answers calls of models from trees: the part of `PrefixSharing` that a `TreeForward` needs."""

    trainer: Trainer
    steps: StepScores

    def answer(self, forward: "TreeForward", args: tuple, kwargs: ModelInputs) -> object: ...
    def token_logprobs(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]: ...


class OwnForward:
    """Stands for a forward that was set on one module. A copy or pickle of the module has the forward of its class.

    In a copy, the forward that TRL sets would call the model that it was made for.
    """

    def __init__(self, module: nn.Module, name: str = "forward"):
        self.module, self._name, self.plain = module, name, getattr(module, name)
        functools.update_wrapper(self, self.plain)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.plain(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return getattr, (self.module, self._name)  # a copy has no attributes yet, so this is the class's forward


class TreeForward(OwnForward):
    """Stands for the forward of a model, and answers calls for scores from a tree.

    It belongs to one model of one trainer. In copies and pickles of the model the plain forward takes its place.
    """

    def __init__(self, answers: Answers, model: nn.Module, name: str):
        super().__init__(model, name)
        self.answers = answers
        self._replaces = vars(model).get(name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.answers.answer(self, args, kwargs)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (
            super().__reduce__() if self._replaces is None or is_fused(self._replaces) else (_same, (self._replaces,))
        )


def _same(forward: Callable[..., object]) -> Callable[..., object]:
    return forward


def tree_forward(model: nn.Module) -> TreeForward | None:
    """The call that `share_prefixes` has put in the place of the model's forward (which Accelerate wraps) or call."""
    placed = (vars(model).get(name) for name in ("forward", "_original_forward", "_call_impl"))
    return next((forward for forward in placed if isinstance(forward, TreeForward)), None)


def is_fused(forward: object) -> bool:
    """Whether this is the forward that TRL's `add_fused_lm_head` installs."""
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return {*FUSED_SETTINGS} <= {*getattr(code, "co_freevars", ())}


def fused_forward(model: nn.Module) -> Any:
    """The forward that TRL's `add_fused_lm_head` has installed beneath others; None if it has not."""
    forward = causal_lm(model).forward
    while forward is not None and not is_fused(forward):
        forward = getattr(forward, "__wrapped__", None)
    return forward


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A call of the method that does not keep its object alive. When the object is gone, it does nothing."""
    reference = weakref.WeakMethod(method)

    def call(*args: object, **kwargs: object) -> None:
        if (alive := reference()) is not None:
            alive(*args, **kwargs)

    return call


def before_steps(method: Callable[[torch.optim.Optimizer], None]) -> None:
    """Call the method before any optimizer of the process steps, for as long as its object lives."""
    call = weakly(method)
    hook = register_optimizer_step_pre_hook(lambda optimizer, _args, _kwargs: call(optimizer))
    weakref.finalize(method.__self__, hook.remove)  # type: ignore[attr-defined]
