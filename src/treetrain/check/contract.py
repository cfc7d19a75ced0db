"""The numerics contract: loss and gradients of trees against rows, in three precisions, over random forests.

In float64, transformers' own casts to float32 become casts to float64, so the model computes in float64 throughout.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import treetrain as tt
from treetrain.check import linear
from treetrain.check.forests import runs, seeded, trajectories
from treetrain.core.losses.protocol import Loss, LossProtocol
from treetrain.layers.experts.routers import experts_of
from treetrain.layers.finders import check_model

TEMPERATURE = 1.3
Rows = list[tt.Trajectory]


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss, and the same loss written out per token to check it."""

    loss: Loss | LossProtocol
    per_token: linear.RowLoss | None = None
    reduction: str = "token"
    temperature: float = TEMPERATURE
    whole: Callable[[tuple[list[Tensor], list[Tensor]], Rows], torch.Tensor] | None = None
    """(scores, rows) -> the loss of the whole batch, for losses that are not a mean over tokens."""
    prepare: Callable[[Rows], Rows] = list
    """Changes the rows for both sides, for example into pairs."""


SFT = Case(tt.losses.sft(), lambda logp, entropy, facts: -logp, temperature=1.0)
PPO = Case(
    tt.losses.ppo(clip=0.2, entropy=0.05),
    lambda logp, entropy, facts: linear.clipped(logp, facts, 0.2, 0.2) - 0.05 * entropy,
)


def scored(model: nn.Module, rows: Rows, temperature: float) -> tuple[list[Tensor], list[Tensor]]:
    """`linear.score_rows`, with the recorded experts of every row that has them."""
    experts, found = experts_of(check_model(model)) if any(row.experts is not None for row in rows) else None, []
    for row in rows:
        forced: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if experts is not None and row.experts is not None:
            assert experts.experts is not None and experts.top_k is not None
            forced = Routes(experts.experts, experts.top_k, row.experts)
        with forced:
            found.append([score[0] for score in linear.score_rows(model, [row.ids.tolist()], temperature)])
    return [logprobs for logprobs, _ in found], [entropies for _, entropies in found]


def expected(model: nn.Module, rows: Rows, cases: Sequence[Case]) -> list[tuple[float, Tensor]]:
    """Loss and gradient of every case by the linear reference; equal temperature and `prepare` share forwards."""
    results = {}
    for temperature, prepare in {(case.temperature, case.prepare) for case in cases}:
        own = prepare(rows)
        scores = scored(model, own, temperature)
        for number, case in enumerate(cases):
            if (case.temperature, case.prepare) == (temperature, prepare):
                if case.whole is not None:
                    loss = case.whole(scores, own)
                else:
                    assert case.per_token is not None, "a case needs per_token or whole"
                    loss = linear.batch_loss(scores, own, case.per_token, case.reduction)
                results[number] = float(loss.detach()), linear.gradients(model, loss, retain_graph=True)
    return [results[number] for number in range(len(cases))]


def measured(model: nn.Module, rows: Rows, case: Case, engine=tt.TreeEngine, **options) -> tuple[float, Tensor]:
    """Loss and gradient by an engine."""
    model.zero_grad()
    engine = engine(model, temperature=case.temperature, **options)
    result = engine.forward_backward(case.prepare(rows), case.loss)
    return result.loss, linear.gradients(model)


def as_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a model in another dtype."""
    return copy.deepcopy(model).to(dtype)


DOUBLE, SINGLE, RATIO = 1e-12, 1e-5, 1.5
"""The contract's bounds on errors in float64 and float32, and on the tree's bfloat16 error over the rows'."""


@dataclasses.dataclass(frozen=True)
class Errors:
    """Relative errors of loss and gradient of trees against rows."""

    float64: float
    """The worst over forests, losses and engines."""
    float32_pairs: tuple[tuple[float, float], ...]
    """Each float32 error of a tree, and the rows' error against float64. Where terms of a gradient nearly cancel, the
    rows' own error exceeds the bound."""
    bfloat16_tree: float | None
    """Root mean square of the gradient's error against float64; None if a model's experts cannot be forced, or if the
    rows' own gradient is not finite."""
    bfloat16_rows: float | None
    """The rows' own root mean square error; None in the same cases."""

    @property
    def float32(self) -> float:
        """The worst error in float32."""
        return max(error for error, _ in self.float32_pairs)

    @property
    def rows_float32(self) -> float:
        """The rows' own worst error in float32."""
        return max(rounding for _, rounding in self.float32_pairs)

    @property
    def ratio(self) -> float | None:
        """The tree's bfloat16 error divided by the rows' own."""
        return self.bfloat16_tree / self.bfloat16_rows if self.bfloat16_tree and self.bfloat16_rows else None

    def check(self, *, lifted: bool = True) -> None:
        """Assert that the contract is held.

        Args:
            lifted: whether transformers' float32 casts were lifted in float64.
        """
        assert self.float64 <= (DOUBLE if lifted else SINGLE), self
        for error, rounding in self.float32_pairs:
            assert error <= max(SINGLE, 3 * rounding), (error, rounding)
        assert self.ratio is None or self.ratio <= RATIO, (self.bfloat16_tree, self.bfloat16_rows)


def errors_of(
    model: nn.Module,
    forests: Sequence[Rows],
    cases: Sequence[Case],
    engines: Sequence[type[tt.TreeEngine]] = (tt.TreeEngine,),
    *,
    lifted: bool = True,
    only_bfloat16: Sequence[Rows] = (),
) -> Errors:
    """Compare losses and gradients of trees with each row alone, in three precisions.

    Both sides run on the same weights, rounded to bfloat16 beforehand so that all three precisions start equal. The
    linear side is `treetrain.check.linear`, which runs the plain model. In bfloat16 both sides use the experts that
    the float32 rows choose: a choice that rounding changes is not an error of either side.

    Args:
        model: it is copied.
        forests: rows with old log-probabilities.
        cases: losses, each with the same loss written out per token.
        engines: kinds of `TreeEngine`, each run on every forest; a subclass may force a plan.
        lifted: whether transformers' casts to float32 are lifted in float64.
        only_bfloat16: more forests for bfloat16, where one rounding may outweigh all others in a forest.
    """
    low = as_dtype(model, torch.bfloat16)
    single, double = as_dtype(low, torch.float32), as_dtype(low, torch.float64)
    doubles: list[float] = []
    singles: list[tuple[float, float]] = []
    trees: list[float] = []
    linears: list[float] = []
    for number, forest in enumerate([*forests, *only_bfloat16]):
        with torch.no_grad():
            rows = clear_of_bounds(forest, scored(single, forest, TEMPERATURE)[0])
        routed = with_experts(single, rows)
        with PureFloat64() if lifted else contextlib.nullcontext():
            truth = expected(double, rows if routed is None else routed, cases)
            if number < len(forests):
                own = truth if routed is rows else expected(double, rows, cases)
                doubles += _errors(double, rows, cases, engines, own)
        if number < len(forests):
            plain = expected(single, rows, cases)
            rounding = [linear.relative_error(found[1], true[1]) for found, true in zip(plain, own)]
            singles += zip(_errors(single, rows, cases, engines, plain), rounding * len(engines))
        if routed is not None:
            linears += [linear.relative_error(x[1], y[1]) for x, y in zip(expected(low, routed, cases), truth)]
            # Against the float64 gradient of the same weights: a higher precision than the contract's float32.
            trees += _errors(low, routed, cases, engines, truth, losses=False)
    finite = bool(linears) and bool(np.isfinite(linears).all())
    pooled = (linear.rms(trees), linear.rms(linears)) if finite else (None, None)
    return Errors(max(doubles), tuple(singles), *pooled)


def _errors(model, rows: Rows, cases: Sequence[Case], engines, truth, *, losses: bool = True) -> list[float]:
    """List the errors of all cases with the first engine, then with the next."""
    found = []
    for engine in engines:
        for case, (loss, gradient) in zip(cases, truth):
            got = measured(model, rows, case, engine)
            error = linear.relative_error(got[1], gradient)
            found.append(max(error, abs(got[0] - loss) / max(abs(loss), 1.0)) if losses else error)
    return found


def check_contract(
    model: nn.Module,
    cases: list[Case],
    examples: int,
    *,
    engines: Sequence[type[tt.TreeEngine]] = (tt.TreeEngine,),
    prepare: Callable[[Rows], Rows] = list,
) -> dict[str, float]:
    """Assert that `errors_of` random forests are within the contract.

    Args:
        model: a small causal LM with at least `forests.VOCAB` tokens; it is copied.
        cases: losses, each with the same loss written out per token.
        examples: number of random forests.
        engines: kinds of `TreeEngine`, each run on every forest; a subclass may force a plan.
        prepare: changes the rows of a forest for all cases, for example adds recorded experts.

    Returns:
        the worst relative error in "float64", and in "float32" (only where the rows' own error is below 3e-6);
        "bfloat16 tree" and "bfloat16 linear", root mean squares against float64; "distinct forests".

    Raises:
        AssertionError: an error is above the contract's bound: 1e-12 in float64, 1e-5 in float32 (or 3 times the rows'
            own rounding), in bfloat16 1.5 times the rows' own error, pooled.
    """
    drawn: list[Rows] = []

    @seeded(f"{type(model).__name__} {[case.loss for case in cases]} {[engine.__name__ for engine in engines]}")
    @runs(examples, derandomize=False)
    @given(trajectories())
    def draw(rows):
        drawn.append(prepare(rows))

    draw()
    errors = errors_of(model, drawn, cases, engines)
    errors.check()
    assert errors.bfloat16_tree is not None and errors.bfloat16_rows is not None
    return {
        "float64": errors.float64,
        "float32": max((error for error, rounding in errors.float32_pairs if rounding < 3e-6), default=0.0),
        "bfloat16 tree": errors.bfloat16_tree,
        "bfloat16 linear": errors.bfloat16_rows,
        "distinct forests": len({tuple(tuple(row.ids.tolist()) for row in rows) for rows in drawn}),
    }


class Routes(TorchFunctionMode):
    """Records the experts that the routers choose for a row's tokens, or makes them choose given ones.

    Args:
        experts: number of experts.
        top_k: number chosen per token.
        given: int64 [L, routers, k]; -1 leaves the choice to the router.
    """

    def __init__(self, experts: int, top_k: int, given: np.ndarray | None = None):
        super().__init__()
        self._experts = experts
        self._top_k = top_k
        self._given = given
        self.found: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        source = args[0]
        if source.dim() != 2 or source.shape[1] != self._experts or found.indices.shape[1] != self._top_k:
            return found
        if self._given is not None and len(self.found) < self._given.shape[1]:  # later ones belong to an auxiliary loss
            given = torch.from_numpy(self._given[:, len(self.found)].astype(np.int64))
            chosen = torch.where(given < 0, found.indices, given)
            found = torch.return_types.topk((source.gather(1, chosen), chosen))
        self.found.append(found.indices)
        return found


def with_experts(model: nn.Module, rows: Rows) -> Rows | None:
    """Record the experts of the rows; where none are recorded yet, the model chooses them.

    Returns the rows themselves for a model without experts, and None if its choices cannot be observed.
    """
    experts = experts_of(check_model(model))
    if experts is None:
        return rows
    if experts.experts is None or experts.top_k is None or experts.ambiguous:
        return None
    routed = []
    for row in rows:
        routes = np.zeros((0, experts.places, experts.top_k), np.int64)
        if len(row):
            with torch.no_grad(), Routes(experts.experts, experts.top_k, row.experts) as seen:
                model(input_ids=torch.tensor([row.ids.tolist()]), use_cache=False)
            if len(seen.found) < experts.places:
                return None
            routes = torch.stack(seen.found[: experts.places], 1).numpy()
        routed.append(row.replace(experts=routes))
    return routed


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


class PureFloat64(TorchFunctionMode):
    """Turns every cast of a float64 (or integer) tensor to float32 into one to float64, in backward too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        lift = _LIFTS.get(func)
        return func(*args, **kwargs) if lift is None else lift(self, func, args, kwargs)

    def _cast(self, func, args, kwargs):
        source = args[0] if args else None
        if isinstance(source, torch.Tensor) and source.dtype in (torch.float64, torch.int64, torch.int32):
            if func is torch.Tensor.float:
                return source.double()
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)

    def _product(self, func, args, kwargs):
        # Positions were lifted, but frequencies were loaded in float32. Unlike sums, products do not promote.
        if {x.dtype for x in args if isinstance(x, torch.Tensor)} == {torch.float32, torch.float64}:
            args = tuple(x.double() for x in args if isinstance(x, torch.Tensor))
        return func(*args, **kwargs)

    def _backward(self, func, args, kwargs):
        # A mode is off while it handles a function, but layers that are recomputed in backward need it on.
        engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def run(*engine_args, **engine_kwargs):
            with self:
                return engine(*engine_args, **engine_kwargs)

        with mock.patch.object(torch.autograd, "_engine_run_backward", run):
            return func(*args, **kwargs)


_CASTS = (
    *(torch.Tensor.float, torch.Tensor.to, torch.Tensor.type),
    *(torch.nn.functional.softmax, torch.softmax, torch.Tensor.softmax),
    *(torch.nn.functional.log_softmax, torch.log_softmax, torch.Tensor.log_softmax),
)
_LIFTS = {
    **dict.fromkeys(_CASTS, PureFloat64._cast),
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), PureFloat64._product),
    **dict.fromkeys((torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad), PureFloat64._backward),
}


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
