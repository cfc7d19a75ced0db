"""Proof on the user's own model and rows: loss and every gradient, tree against each row by itself.

The linear side is the model's own forward, one row at a time, with its own attention and its full logits. Gradients are
compared by random sums of all their elements (`sketch.py`), so that no two of them are held whole.
"""

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from operator import add
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from treetrain.check.row_scores import scores_of_logits
from treetrain.check.sketch import sketch_size, sketched
from treetrain.core.engine.deferred import gradients_aside
from treetrain.core.errors import UnsupportedModel, expect
from treetrain.core.hf.capability import model_device
from treetrain.core.hf.tree_mode import replaced
from treetrain.core.losses.protocol import Loss, LossProtocol, as_loss, needs_logprobs
from treetrain.core.planning.make import Bytes
from treetrain.core.tree.token_ids import IdSets
from treetrain.core.tree.token_tree import Row, TokenTree, as_tree
from treetrain.engine import TreeEngine, loaded
from treetrain.kernels.checks import relative_error
from treetrain.layers.experts.experts import RouterBalance, by_place, route_as_recorded
from treetrain.layers.experts.routers import experts_of
from treetrain.layers.finders import check_model
from treetrain.layers.images.encoders import image_inputs
from treetrain.layers.trajectory import Trajectory
from treetrain.losses import sft
from treetrain.parallel.tensor_parallel import tensor_parallel_mode, tensor_parallel_ranks

logger = logging.getLogger(__name__)
T = TypeVar("T")
EVERY = 10
"""Seconds between two lines of the log that say how many rows are done."""
Scores = tuple[
    Float[Tensor, " predictions"],
    Float[Tensor, " predictions"] | None,
    Float[Tensor, " predictions *columns"] | None,
    Float[Tensor, " ids"] | None,
]
"""Log-probabilities, entropies, values and log-probabilities of a teacher's ids of a row; values are at the tokens
before the predicted ones."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}
"""Global gradient error that is always allowed, by model dtype. Some layers of transformers compute in float32."""
LINEAR_FACTOR = 1.5
"""Below float64, the error of a tree against a wider dtype may be this many times that of the linear run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParameterError:
    """How far one parameter's gradient is from that of the linear run."""

    name: str
    norm: float
    """Norm of the linear run's gradient."""
    error: float
    """Norm of the difference over ``norm`` (over the largest norm of any parameter where ``norm`` is 0)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TreeReport:
    """The tree of a `verify` or `bench`, and how it ran."""

    trajectories: int
    flat_tokens: int
    unique_tokens: int
    attention: str
    """The backends of tree attention that ran."""
    parts: int
    """Forward-backward passes under the budget."""
    recomputed_tokens: int
    """Tokens whose forward ran twice."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport(TreeReport):
    """The outcome of `verify`."""

    passed: bool
    verdict: str
    loss_tree: float
    loss_linear: float
    gradient_error: float
    """Global: norm of all differences over the norm of all gradients of the reference: the linear run in the next wider
    dtype, or in the model's own where `linear_error` is None."""
    linear_error: float | None
    """The linear run's own error against float64 (of a float32 model) or float32 (of a bf16 or fp16 model). None for a
    float64 model, and where a float32 model has no float64 copy."""
    tolerance: float
    dtype: str
    all_gradients: bool
    """Whether norms are those of all elements of the gradients; else they are measured by random sums of these."""
    parameters: tuple[ParameterError, ...]
    """Worst first."""


def verify(
    model: nn.Module,
    trajectories: Sequence[Row] | TokenTree,
    *,
    loss: LossProtocol | Callable[..., object] | None = None,
    temperature: float = 1.0,
    tolerance: float | None = None,
    budget: int | str | Bytes | None = None,
    value_head: nn.Module | None = None,
    all_gradients: bool = False,
) -> VerifyReport:
    """Compare a tree's loss and gradients with those of every row by itself, by the plain model.

    Args:
        model: a causal LM, or a critic; its gradients and mode are left as they were.
        trajectories: a sample of rows as `TreeEngine.forward_backward` takes them. The plain side holds one row's
            logits, [L, V], at a time, or those of all rows for a batch-scope loss.
        loss: any loss of the protocol; None is `losses.sft()`.
        temperature: divides the logits before the softmax, on both sides.
        tolerance: largest global gradient error; None takes that of the model's dtype. Both runs are measured against
            a copy of the model in the next wider dtype (float32 of bf16 and fp16, float64 of float32), and the tree may
            err 1.5 times as much as linear, in float32 at least 1e-5.
        budget, value_head: of the tree's side, see `TreeEngine`; the head's gradients are compared, too.
        all_gradients: hold the gradients of all runs whole, two or three times the weights, and compare element by
            element. False holds one run's at a time and compares random sums of all elements, which give every norm
            within a few percent.

    Raises:
        UnsupportedModel, DataError, ValueError, TypeError: as `TreeEngine.forward_backward`.
    """
    expect("model", model, nn.Module, "the model itself: tt.load_model(name)")
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance}; give a relative error from 0, such as 1e-5")
    loss = as_loss(sft() if loss is None else loss)
    tree = as_tree(trajectories, merge=True)
    rows = [Trajectory.of(row) for row in tree.trajectories]
    dtype: torch.dtype = loaded(model).dtype  # type: ignore[assignment]
    exact = dtype in TOLERANCE
    if not exact and not tensor_parallel_ranks(model).alone:
        raise UnsupportedModel(
            f"verify of a tensor-parallel model in {dtype} needs a float32 copy of it, which cannot be made: its hooks "
            "would run the weights of the original. Load the model in float32 or float64 to verify it."
        )
    plain = PlainModel(model, value_head, temperature)
    size = None if all_gradients else sketch_size(list(plain.trained))
    if not exact and plain.experts is not None:
        raise UnsupportedModel(
            f"verify of a mixture of experts in {dtype}: rounding changes which experts it chooses, which is no error "
            "of the tree. Load the model in float32 to verify it."
        )
    normaliser = float(loss.normaliser(rows))

    engine = TreeEngine(model, budget=budget, temperature=temperature, value_head=value_head, check=False)
    result, gradients = plain.gradients_of(lambda: engine.forward_backward(tree, loss, normaliser), size)

    def run_linear() -> float:
        # Within `gradients_of`, which sets aside the hooks that are there before it.
        with tensor_parallel_mode(model, tensor_parallel_ranks(model)):
            return plain.accumulate_gradients(rows, loss, normaliser)

    loss_linear, linear = plain.gradients_of(run_linear, size)
    reference = linear
    linear_error = None
    limit = TOLERANCE.get(dtype, 0.0)
    against = "each row by itself"
    wider = torch.float32 if not exact else torch.float64
    if dtype != wider and plain.has_copies:
        try:
            wide = plain.copy_in(wider)
            _, reference = wide.gradients_of(lambda: wide.accumulate_gradients(rows, loss, normaliser), size)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            if not exact:
                raise
            logger.warning("the float32 model is compared with its own rows, since float64 failed: %s", error)
        else:
            linear_error = relative_error(linear.values(), reference.values())
            limit, against = max(limit, LINEAR_FACTOR * linear_error), f"a {str(wider)[6:]} run of each row by itself"
    limit = limit if tolerance is None else tolerance

    error = relative_error(gradients.values(), reference.values())
    norms = {name: float(gradient.double().norm()) for name, gradient in reference.items()}
    largest = max(norms.values(), default=0.0) or 1.0
    parameters = []
    for name, gradient in reference.items():
        apart = float((gradients[name].double() - gradient.double()).norm())
        parameters.append(ParameterError(name=name, norm=norms[name], error=apart / (norms[name] or largest)))
    same_loss = abs(result.loss - loss_linear) <= TOLERANCE.get(dtype, 2e-2) * max(1.0, abs(loss_linear))
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
        attention=", ".join(result.attention) or "none",
        trajectories=len(rows),
        flat_tokens=result.flat_tokens,
        unique_tokens=result.unique_tokens,
        parts=result.parts,
        recomputed_tokens=result.recomputed_tokens,
        all_gradients=all_gradients,
        parameters=tuple(sorted(parameters, key=lambda parameter: -parameter.error)),
    )


def _places(sets: IdSets, device: torch.device) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"]]:
    """The predictions that the ids of a row's sets belong to, and the ids."""
    of_predictions = sets.select(np.arange(1, len(sets)))
    of, ids = (torch.from_numpy(x).long().to(device) for x in (of_predictions.places, of_predictions.ids))
    return of, ids


def _over_kept(kept: IdSets, logits: Float[Tensor, "T V"]) -> Float[Tensor, "T V"]:
    """Logits of which those outside of the kept sets, where there are any, have no share in the softmax."""
    of, ids = _places(kept, logits.device)
    outside = torch.zeros_like(logits, dtype=torch.bool)
    outside[of] = True
    outside[of, ids] = False
    return logits.masked_fill(outside, torch.finfo(logits.dtype).min / 4)  # finite, so that 0 times its log is 0


class PlainModel:
    """A model's own forward, one row at a time; its routers use the experts recorded in the row.

    Args:
        model: a causal LM, or a critic.
        value_head: computes values from the inputs of a causal LM's head.
        temperature: divides the logits.
    """

    def __init__(self, model: nn.Module, value_head: nn.Module | None = None, temperature: float = 1.0):
        capabilities = check_model(model, critics=True)
        self._model = model
        self._value_head = value_head
        self._temperature = temperature
        self._head, self.experts = capabilities.head, experts_of(capabilities)
        self._wide = torch.promote_types(model.dtype, torch.float32)  # type: ignore[arg-type]

    @property
    def has_copies(self) -> bool:
        """Whether a copy in a wider dtype computes the same but for rounding.

        Rounding changes which experts a router chooses. Hooks of a tensor-parallel model run the original's weights.
        """
        return self.experts is None and tensor_parallel_ranks(self._model).alone

    def copy_in(self, dtype: torch.dtype) -> "PlainModel":
        """A copy in a wider dtype."""
        model, head = copy.deepcopy((self._model, self._value_head))  # together: a head may be a part of the model
        for module in (model, head):
            if module is not None:  # a model loaded from a GGUF file refuses its own methods, though it is dequantised
                nn.Module.to(module, dtype)
        return PlainModel(model, head, self._temperature)

    @property
    def trained(self) -> dict[nn.Parameter, str]:
        """The trained parameters of model and value head, and their names."""
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        if self._value_head is not None:
            for name, parameter in self._value_head.named_parameters(prefix="value_head"):
                names.setdefault(parameter, name)
        return {parameter: name for parameter, name in names.items() if parameter.requires_grad}

    def gradients_of(self, call: Callable[[], T], size: int | None = None) -> tuple[T, dict[str, Tensor]]:
        """Return a call's result and the gradients that it leaves, by parameter name; ``.grad`` is left as it was.

        Args:
            size: return sketches of at most this many numbers; None: the gradients.
        """
        parameters = list(self.trained)
        if size is not None:
            with sketched(parameters, size) as gradients:
                returned = call()
        else:
            with gradients_aside(parameters) as left:
                returned = call()
            gradients = [torch.zeros_like(p) if grad is None else grad.detach() for p, grad in zip(parameters, left)]
        return returned, dict(zip(self.trained.values(), gradients))

    def accumulate_gradients(self, rows: Sequence[Trajectory], loss: Loss, normaliser: float) -> float:
        """Add a step's gradients to ``.grad``; returns its loss."""
        summed = 0.0
        if loss.scope == "batch":
            scored = []
            for row in rows:
                with self._routed(row):
                    scored.append(self._scores(row, loss))
            lists = [None if column[0] is None else list(column) for column in zip(*scored)]
            total, _ = loss(lists[0], lists[1], list(rows), values=lists[2])
            (total / normaliser).backward()
            summed = float(total.detach())
        else:
            due = time.monotonic() + EVERY
            for done, row in enumerate(rows):
                if time.monotonic() > due:
                    dtype = str(self._model.dtype)[6:]
                    logger.info("%d of %d rows are computed by themselves, in %s", done, len(rows), dtype)
                    due = time.monotonic() + EVERY
                if not loss.reads_untrained and not row.weights.any():
                    continue
                with self._routed(row):
                    logprobs, entropies, values, of_ids = self._scores(row, loss)
                    given = {"id_logprobs": of_ids} if "id_logprobs" in loss.needs else {}
                    total, _ = loss(logprobs, entropies, row, values=values, **given)
                    if total.requires_grad:
                        (total / normaliser).backward()
                summed += float(total.detach())
        return summed / normaliser + self._accumulate_auxiliary_gradients([row for row in rows if len(row)])

    def _scores(self, row: Trajectory, loss: Loss) -> Scores:
        entropy, valued = "entropies" in loss.needs, "predicted_values" in loss.needs
        if len(row) < 2:
            nothing = torch.zeros(0, dtype=self._wide, device=model_device(self._model))
            return nothing, nothing if entropy else None, nothing if valued else None, nothing
        ids, seen = self._ids(row), {}
        hook = self._head.register_forward_hook(lambda _, given, made: seen.update(hidden=given[0], made=made))
        try:
            logits = self._model(input_ids=ids, use_cache=False, **image_inputs(row, self._model)).logits
        finally:
            hook.remove()
        values = self._values(seen) if valued else None
        if not needs_logprobs(loss):
            return torch.zeros(len(row) - 1, dtype=self._wide, device=ids.device), None, values, None
        logits, tokens = logits[0, :-1], ids[0, 1:]
        own = logits if row.sampling_mask is None else _over_kept(row.sampling_mask, logits)
        logprobs, entropies = scores_of_logits(own, tokens, self._temperature, entropy=entropy)
        of_ids = None
        if "id_logprobs" in loss.needs and row.teacher_topk is not None:
            of, at = _places(row.teacher_topk, logits.device)
            whole, _ = scores_of_logits(logits, tokens, self._temperature)
            apart = (logits[of, at].double() - logits[of, tokens[of]]) / self._temperature
            of_ids = (whole[of] + apart).to(self._wide)
        return logprobs, entropies, values, of_ids

    def _values(self, seen: dict[str, Tensor]) -> Float[Tensor, " predictions *columns"]:
        """From the inputs and outputs of the model's head."""
        if self._value_head is None:  # for sequence classification the model returns the last token's value alone
            values = seen["made"][0, :-1]
        else:
            parameter = next(self._value_head.parameters(), seen["hidden"])
            values = self._value_head(seen["hidden"][0, :-1].to(parameter.dtype))
        return (values.squeeze(1) if values.dim() == 2 and values.shape[1] == 1 else values).to(self._wide)

    def _ids(self, row: Trajectory) -> Int64[Tensor, "1 tokens"]:
        return torch.from_numpy(row.ids).long().unsqueeze(0).to(model_device(self._model))

    # ---- Mixtures of experts ----

    @contextmanager
    def _routed(self, row: Trajectory) -> Iterator[None]:
        """Route to the row's recorded experts inside the block, which must include the backward."""
        experts = self.experts
        recorded = None if experts is None else by_place(experts, row.experts)
        with ExitStack() as stack:
            if experts is not None and recorded is not None:
                taken = torch.from_numpy(recorded).to(model_device(self._model))
                for router in experts.routers:
                    own = taken[:, router.place]
                    forward = partial(route_as_recorded, router, own, experts, router.module.forward)
                    stack.enter_context(replaced(router.module, forward=forward))
            yield

    def _accumulate_auxiliary_gradients(self, rows: Sequence[Trajectory]) -> float:
        """Add the gradient of the routers' auxiliary loss of all rows, times its coefficient; returns that product.

        The choices have no gradient. Their counts over all rows are computed first; then the backward runs row by row.
        """
        experts = self.experts
        if experts is None or not experts.auxiliary or not rows:
            return 0.0
        assert experts.top_k is not None
        balances = []
        for row in rows:
            with torch.no_grad(), self._routed(row):
                balances.append(RouterBalance.of(self._probabilities(row), experts.top_k))
        whole = reduce(add, balances)
        for row in rows:
            with self._routed(row):
                own = experts.auxiliary * (self._probabilities(row).double().sum(0) @ whole.slope)
                if own.requires_grad:
                    own.backward()
        return experts.auxiliary * float(whole.loss)

    def _probabilities(self, row: Trajectory) -> Float[Tensor, "_ experts"]:
        given = image_inputs(row, self._model)
        logits = self._model(
            input_ids=self._ids(row), use_cache=False, output_router_logits=True, **given
        ).router_logits
        return torch.cat([layer.to(logits[0].device) for layer in logits]).softmax(-1)
