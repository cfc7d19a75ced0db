"""The numerics contract: loss and gradients of trees against rows, in three precisions, over random forests.

In float64, transformers' own float32 casts are lifted, so that a float64 model computes in float64 throughout.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import treetrain as tt
from treetrain.testing import linear
from treetrain.testing.forests import runs, seeded, trajectories

TEMPERATURE = 1.3
Rows = list[tt.Trajectory]


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss, and the same loss written out per token to check it."""

    loss: Any
    """Given to `TreeEngine.forward_backward`."""
    per_token: linear.RowLoss | None = None
    reduction: str = "token"
    temperature: float = TEMPERATURE
    whole: Callable[[Any, Rows], torch.Tensor] | None = None
    """(scores, rows) -> the loss of the whole batch, for losses that are not a mean over tokens."""
    prepare: Callable[[Rows], Rows] = list
    """Changes the rows for both sides, for example into pairs."""


SFT = Case(tt.losses.sft(), lambda logp, entropy, facts: -logp, temperature=1.0)
PPO = Case(
    tt.losses.ppo(clip=0.2, entropy=0.05),
    lambda logp, entropy, facts: linear.clipped(logp, facts, 0.2, 0.2) - 0.05 * entropy,
)


def _reinforce(kind: str, reduction: str, entropy: float) -> Case:
    def per_token(logp, entropies, facts):
        return -facts["advantages"] * logp + 0.3 * linear.kl(kind, logp, facts) - entropy * entropies

    loss = tt.losses.reinforce(kl=0.3, kl_estimator=kind, entropy=entropy, reduction=reduction)  # type: ignore[arg-type]
    return Case(loss, per_token, reduction)


OTHERS = {
    "sft per trajectory": Case(
        tt.losses.sft(reduction="trajectory"), lambda logp, entropy, facts: -logp, "trajectory", 0.7
    ),
    "reinforce": Case(tt.losses.reinforce(), lambda logp, entropy, facts: -facts["advantages"] * logp),
    "reinforce k1": _reinforce("k1", "trajectory", 0.0),
    "reinforce k2": _reinforce("k2", "token", 0.0),
    "reinforce k3 entropy": _reinforce("k3", "token", 0.1),
    "ppo asymmetric": Case(
        tt.losses.ppo(clip_low=0.1, clip_high=0.3), lambda logp, entropy, facts: linear.clipped(logp, facts, 0.1, 0.3)
    ),
    "grpo": Case(
        tt.losses.grpo(clip=0.2, kl=0.1),
        lambda logp, entropy, facts: linear.clipped(logp, facts, 0.2, 0.2) + 0.1 * linear.kl("k3", logp, facts),
        "trajectory",
    ),
    "grpo on policy": Case(
        tt.losses.grpo(on_policy=True),
        lambda logp, entropy, facts: -(logp - logp.detach()).exp() * facts["advantages"],
        "trajectory",
    ),
}


def expected(model, rows, cases: list[Case]) -> list[tuple[float, torch.Tensor]]:
    """Loss and gradient of every case by the linear reference; cases with equal temperature share the forward."""
    results = {}
    for temperature, prepare in {(case.temperature, case.prepare) for case in cases}:
        own = prepare(rows)
        scores = linear.score_rows(model, [row.ids.tolist() for row in own], temperature)
        for number, case in enumerate(cases):
            if (case.temperature, case.prepare) == (temperature, prepare):
                if case.whole is not None:
                    loss = case.whole(scores, own)
                else:
                    assert case.per_token is not None, "a case needs per_token or whole"
                    loss = linear.batch_loss(scores, own, case.per_token, case.reduction)
                results[number] = float(loss), linear.gradients(model, loss, retain_graph=True)
    return [results[number] for number in range(len(cases))]


def measured(model, rows, case: Case, engine=tt.TreeEngine, **options) -> tuple[float, torch.Tensor]:
    """Loss and gradient by an engine."""
    model.zero_grad()
    engine = engine(model, temperature=case.temperature, **options)
    result = engine.forward_backward(case.prepare(rows), case.loss)
    return result.loss, linear.gradients(model)


def as_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a model in another dtype."""
    return copy.deepcopy(model).to(dtype)


def check_contract(
    model: nn.Module,
    cases: list[Case],
    examples: int,
    *,
    engines: Sequence[type[tt.TreeEngine]] = (tt.TreeEngine,),
) -> dict[str, float]:
    """Compare losses and gradients of trees with those of each row alone, over random forests.

    Both sides run on the same weights, rounded to bfloat16 beforehand so that all three precisions start equal. The
    linear side is `treetrain.testing.linear`, which uses nothing of the library.

    Args:
        model: a small causal LM with at least `forests.VOCAB` tokens; it is copied.
        cases: losses, each with the same loss written out per token.
        examples: number of random forests.
        engines: kinds of `TreeEngine`, each run on every forest; a subclass may force a plan.

    Returns:
        the worst relative error in "float64" and "float32"; "bfloat16 tree" and "bfloat16 linear", root mean squares
        against float64; "distinct forests".

    Raises:
        AssertionError: an error is above the contract's bound: 1e-12 in float64, 1e-5 in float32 (or 3 times the rows'
            own rounding), in bfloat16 1.5 times the rows' own error, pooled.
    """
    low = as_dtype(model, torch.bfloat16)
    single, double = as_dtype(low, torch.float32), as_dtype(low, torch.float64)
    worst = {"float64": 0.0, "float32": 0.0}
    tree_errors: list[float] = []
    linear_errors: list[float] = []

    distinct: set = set()

    @seeded(f"{type(model).__name__} {[case.loss for case in cases]} {[engine.__name__ for engine in engines]}")
    @runs(examples, derandomize=False)
    @given(trajectories())
    def every_forest(rows):
        distinct.add(tuple(tuple(row.ids.tolist()) for row in rows))
        with torch.no_grad():
            scores, _ = linear.score_rows(single, [row.ids.tolist() for row in rows], TEMPERATURE)
        rows = clear_of_bounds(rows, scores)
        with PureFloat64():
            truth = expected(double, rows, cases)
            pure = [[measured(double, rows, case, engine) for case in cases] for engine in engines]
        plain = expected(single, rows, cases)
        bfloat = expected(low, rows, cases)
        for number, case in enumerate(cases):
            loss, gradient = truth[number]
            linear_errors.append(linear.relative_error(bfloat[number][1], gradient))
            rounding = linear.relative_error(plain[number][1], gradient)
            for engine, found in zip(engines, pure):
                assert found[number][0] == pytest.approx(loss, rel=1e-12, abs=1e-12)
                error = linear.relative_error(found[number][1], gradient)
                assert error <= 1e-12
                worst["float64"] = max(worst["float64"], error)
                got = measured(single, rows, case, engine)
                assert got[0] == pytest.approx(plain[number][0], rel=1e-5, abs=1e-5)
                error = linear.relative_error(got[1], plain[number][1])
                # Where terms of a gradient nearly cancel, the rows' own float32 run is further off than the bound.
                assert error <= max(1e-5, 3 * rounding)
                worst["float32"] = max(worst["float32"], error if rounding < 3e-6 else 0.0)
                # Against the float64 gradient of the same weights: a higher precision than the contract's float32.
                tree_errors.append(linear.relative_error(measured(low, rows, case, engine)[1], gradient))

    every_forest()
    worst["distinct forests"] = len(distinct)
    worst["bfloat16 tree"], worst["bfloat16 linear"] = linear.rms(tree_errors), linear.rms(linear_errors)
    assert worst["bfloat16 tree"] <= 1.5 * worst["bfloat16 linear"]
    return worst


CLIP_BOUNDS = (0.8, 0.9, 1.2, 1.28, 1.3)
"""The bounds at which the losses of the contract clip a ratio."""


def clear_of_bounds(rows: Sequence[tt.Trajectory], scores: Sequence[torch.Tensor]) -> list[tt.Trajectory]:
    """The rows with old log-probabilities shifted so that no ratio is within 3% of a clip bound.

    Near a bound, a rounding in bfloat16 decides whether a token has a gradient, which is neither side's error.

    Args:
        scores: [L - 1] log-probabilities of every row now.
    """
    bounds, shifts = np.log(CLIP_BOUNDS), np.array([0.0, 0.07, -0.07, 0.14, -0.14])
    moved = []
    for row, logprobs in zip(rows, scores, strict=True):
        assert row.old_logprobs is not None
        old = row.old_logprobs.copy()
        ratio = logprobs.double().numpy() - old[1:]
        clear = np.abs(ratio[:, None, None] - shifts[:, None] - bounds).min(axis=2) > 0.03
        assert clear.any(axis=1).all()
        old[1:] += shifts[clear.argmax(axis=1)]
        moved.append(row.replace(old_logprobs=old))
    return moved


_BACKWARDS = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_LIFTED = (torch.float64, torch.int64, torch.int32)
_SOFTMAX = {torch.nn.functional.softmax, torch.softmax, torch.Tensor.softmax}
_PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}
_LOG_SOFTMAX = {torch.nn.functional.log_softmax, torch.log_softmax, torch.Tensor.log_softmax}


class PureFloat64(TorchFunctionMode):
    """Every cast of a float64 (or integer) tensor to float32 becomes one to float64; holds in backward too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _BACKWARDS:
            return self._lifted_backward(func, args, kwargs)
        source = args[0] if args else None
        if isinstance(source, torch.Tensor) and source.dtype in _LIFTED:
            if func is torch.Tensor.float:
                return source.double()
            if func in (torch.Tensor.to, torch.Tensor.type):
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if func in (_SOFTMAX | _LOG_SOFTMAX | {torch.Tensor.to}) and kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        if func in _PRODUCTS and {x.dtype for x in args if isinstance(x, torch.Tensor)} == {
            torch.float32,
            torch.float64,
        }:
            # Positions were lifted, frequencies loaded in float32 were not. Unlike sums, products do not promote.
            args = tuple(x.double() for x in args if isinstance(x, torch.Tensor))
        return func(*args, **kwargs)

    def _lifted_backward(self, func, args, kwargs):
        # A mode is off while it handles a function, but layers that are recomputed in backward need it on.
        engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def run(*engine_args, **engine_kwargs):
            with self:
                return engine(*engine_args, **engine_kwargs)

        with mock.patch.object(torch.autograd, "_engine_run_backward", run):
            return func(*args, **kwargs)


class RoundsToFloat32(TorchDispatchMode):
    """Counts float32 results computed from float64 tensors, to prove that nothing was left to lift."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = [a for a in tree_leaves(args) if isinstance(a, torch.Tensor)]
        outputs = [o for o in tree_leaves(out) if isinstance(o, torch.Tensor)]
        if any(i.dtype == torch.float64 for i in inputs) and any(o.dtype == torch.float32 for o in outputs):
            self.found.append(str(func))
        return out
