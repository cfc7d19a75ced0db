"""Proof on the user's own model and rows: loss and every gradient, tree against each row by itself.

The linear side is the model's own forward, one row at a time, with its own attention and its full logits.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from treetrain.engine.engine import TreeEngine
from treetrain.engine.gradients import gradients_of
from treetrain.engine.loss import as_loss
from treetrain.losses.sft import sft
from treetrain.models.capability import check_model
from treetrain.planning.budget import Bytes
from treetrain.tree.build import Row, as_tree, build_tree
from treetrain.tree.token_tree import TokenTree
from treetrain.verification.plain_model import PlainModel

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}
"""Largest global gradient error by model dtype. Some layers of transformers always compute in float32."""
LOW_PRECISION_FACTOR = 1.5
"""The error of a bf16 or fp16 tree against float32 may be this many times that of the linear run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParameterError:
    """How far one parameter's gradient is from that of the linear run."""

    name: str
    norm: float
    """Norm of the linear run's gradient."""
    error: float
    """Norm of the difference over ``norm`` (over the largest norm of any parameter where ``norm`` is 0)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """The outcome of `verify`."""

    passed: bool
    verdict: str
    """The outcome in one sentence."""
    loss_tree: float
    loss_linear: float
    gradient_error: float
    """Global: norm of all differences over the norm of all gradients of the linear (or float32) run."""
    linear_error: float | None
    """For bf16 and fp16: the linear run's own error against float32; None otherwise."""
    tolerance: float
    dtype: str
    attention: str
    """Which tree attention ran, and why."""
    trajectories: int
    flat_tokens: int
    unique_tokens: int
    parts: int
    """Forward-backward passes that the tree took under its budget."""
    recomputed_tokens: int
    """Tokens whose forward ran twice."""
    parameters: tuple[ParameterError, ...]
    """Worst first."""

    def as_dict(self) -> dict[str, Any]:
        """The report as plain numbers and strings."""
        return dataclasses.asdict(self)


def verify(
    model: nn.Module,
    trajectories: Sequence[Row] | TokenTree,
    *,
    loss: Any = None,
    temperature: float = 1.0,
    tolerance: float | None = None,
    budget: int | str | Bytes | None = None,
    value_head: nn.Module | None = None,
) -> VerifyReport:
    """Compare a tree's loss and gradients with those of every row by itself, by the plain model.

    Args:
        model: a causal LM, or a critic; its gradients and mode are left as they were.
        trajectories: a sample, K rows as `TreeEngine.forward_backward` takes them: trajectories, lists or arrays of
            token ids, or a tree. The plain side holds one row's logits, [L, V], at a time, or
            those of all rows for a batch-scope loss.
        loss: any loss of the protocol; None is `losses.sft()`.
        temperature: divides the logits before the softmax, on both sides.
        tolerance: largest global gradient error; None takes that of the model's dtype. In bf16 and fp16 both runs
            are measured against a float32 copy of the model, and the tree may err 1.5 times as much as linear.
        budget, value_head: of the tree's side, see `TreeEngine`; the head's gradients are compared, too.

    Returns:
        a report: `passed`, a `verdict` in one sentence, both losses, the global gradient error and that of every
        parameter, counts of tokens and parts.

    Raises:
        UnsupportedModel, DataError, ValueError, TypeError: as `TreeEngine.forward_backward`.
    """
    loss = as_loss(sft() if loss is None else loss)
    tree = as_tree(trajectories, merge=True)
    rows = list(tree.trajectories)
    loss = loss.for_step(rows)
    dtype: torch.dtype = model.dtype  # type: ignore[assignment]
    exact = dtype in TOLERANCE
    if not exact and check_model(model, critics=True).experts is not None:
        # Rounding may change the choice of experts, which is no error of the tree: all sides use the float32 model's.
        rows = PlainModel(copy.deepcopy(model).float()).with_experts(rows)
        tree = build_tree(rows)
    normaliser = float(loss.normaliser(rows))

    engine = TreeEngine(model, budget=budget, temperature=temperature, value_head=value_head)
    result, gradients = _run(lambda: engine.forward_backward(tree, loss, normaliser), model, value_head)
    plain = PlainModel(model, value_head, temperature)
    loss_linear, linear = _run(lambda: plain.accumulate_gradients(rows, loss, normaliser), model, value_head)
    reference, linear_error, limit = linear, None, TOLERANCE.get(dtype, 0.0)
    if not exact:
        wide, wide_head = copy.deepcopy((model, value_head))  # together: a head may be a part of the model
        wide, wide_head = wide.float(), None if wide_head is None else wide_head.float()
        plain = PlainModel(wide, wide_head, temperature)
        _, reference = _run(lambda: plain.accumulate_gradients(rows, loss, normaliser), wide, wide_head)
        linear_error = relative_error(linear.values(), reference.values())
        limit = LOW_PRECISION_FACTOR * linear_error
    limit = limit if tolerance is None else tolerance

    error = relative_error(gradients.values(), reference.values())
    same_loss = abs(result.loss - loss_linear) <= TOLERANCE.get(dtype, 2e-2) * max(1.0, abs(loss_linear))
    against = "each row by itself" if exact else "a float32 run of each row by itself"
    own = "" if linear_error is None else f" (the linear run's own error is {linear_error:.2e})"
    if not same_loss:
        verdict = f"NOT EXACT: the loss is {result.loss:.9g} as a tree and {loss_linear:.9g} row by row"
    elif error <= limit:
        verdict = f"exact: gradients differ from {against} by {error:.2e}, within {limit:.2e}{own}"
    else:
        verdict = f"NOT EXACT: gradients differ from {against} by {error:.2e}, allowed is {limit:.2e}{own}"
    return VerifyReport(
        passed=error <= limit and same_loss,
        verdict=verdict,
        loss_tree=result.loss,
        loss_linear=loss_linear,
        gradient_error=error,
        linear_error=linear_error,
        tolerance=limit,
        dtype=str(dtype).removeprefix("torch."),
        attention=str(engine.attention),
        trajectories=len(rows),
        flat_tokens=result.flat_tokens,
        unique_tokens=result.unique_tokens,
        parts=result.parts,
        recomputed_tokens=result.recomputed_tokens,
        parameters=_by_parameter(gradients, reference),
    )


def _run(call: Callable[[], Any], model: nn.Module, value_head: nn.Module | None) -> tuple[Any, dict[str, Tensor]]:
    """Return a call's result and its gradients by parameter name; ``.grad`` is left as it was."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    if value_head is not None:
        for name, parameter in value_head.named_parameters(prefix="value_head"):
            names.setdefault(parameter, name)
    returned: list[Any] = []
    left = gradients_of(list(names), lambda: returned.append(call()))
    gradients = {
        name: torch.zeros_like(parameter) if grad is None else grad.detach()
        for (parameter, name), grad in zip(names.items(), left)
        if parameter.requires_grad
    }
    return returned[0], gradients


def relative_error(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """|found - expected| / |expected| over all tensors together; infinite where only the expected ones are 0."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    difference = sum(float((a - b).square().sum()) for a, b in pairs)
    total = sum(float(b.square().sum()) for _, b in pairs)
    return (difference / total) ** 0.5 if total else difference and float("inf")


def _by_parameter(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[ParameterError, ...]:
    norms = {name: float(g.double().norm()) for name, g in reference.items()}
    largest = max(norms.values(), default=0.0) or 1.0
    errors = []
    for name, grad in reference.items():
        difference = float((gradients[name].double() - grad.double()).norm())
        errors.append(ParameterError(name=name, norm=norms[name], error=difference / (norms[name] or largest)))
    return tuple(sorted(errors, key=lambda e: -e.error))
