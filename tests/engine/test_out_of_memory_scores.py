"""Out of memory where log-probabilities are asked for, with and without gradients: smaller parts, same results."""

import warnings

import pytest
import torch

import treetrain as tt
from support.models import make_model
from support.shortage import ERRORS, IDS, Shortage, freed_at_once, named_budget
from treetrain.check import linear
from treetrain.check.contract import PureFloat64


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3", dtype=torch.float64)


@pytest.fixture(autouse=True)
def clean(model):
    with freed_at_once(model):
        yield


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", [None, 12])
@pytest.mark.parametrize("limit", [7, 3, 1])
def test_scores_that_do_not_fit_are_made_in_smaller_parts(model, limit, budget):
    with Shortage(model, plain=limit) as shortage, warnings.catch_warnings(record=True) as caught, PureFloat64():
        warnings.simplefilter("always")
        got = tt.TreeEngine(model, budget=budget).logprobs(IDS, return_entropy=True)
        reference = linear.score_rows(model, IDS)
    for row, other in zip(got[0] + got[1], reference[0] + reference[1]):
        torch.testing.assert_close(row, other.detach(), rtol=1e-12, atol=1e-12)
    assert shortage.failures
    named = named_budget(caught)
    assert limit // 2 < named <= limit
    with Shortage(model, plain=limit) as shortage, warnings.catch_warnings():
        warnings.simplefilter("error")
        tt.TreeEngine(model, budget=named).logprobs(IDS)
    assert not shortage.failures


def own_loss(logps, entropies):
    sums = torch.stack([row.sum() for row in logps])
    return (
        torch.nn.functional.softplus(sums[0] - sums[1]) + sums.logsumexp(0) + sum((row**2).sum() for row in entropies)
    )


def primitive(model, budget: int | None, **limits) -> tuple[list[int], torch.Tensor, Shortage]:
    """Budgets named in forward and backward, and the gradient, of a loss over all rows."""
    with Shortage(model, **limits) as shortage, warnings.catch_warnings(record=True) as caught, PureFloat64():
        warnings.simplefilter("always")
        logps, entropies = tt.logprobs(model, IDS, budget=budget, return_entropy=True)
        gradient = linear.gradients(model, own_loss(logps, entropies))
    return [named_budget([w]) for w in caught], gradient, shortage


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("budget", "limits", "warned"),
    [
        (None, {"graph": 2}, 2),
        (None, {"graph": 5, "plain": 5}, 2),
        pytest.param(None, {"alive": 9}, 1, marks=pytest.mark.slow),
        (None, {"backward": 2}, 1),
        pytest.param(12, {"plain": 5}, 2, marks=pytest.mark.slow),
        pytest.param(12, {"total": 6}, 2, marks=pytest.mark.slow),
        (12, {"backward_alive": 1}, 1),
        pytest.param(None, {"graph": 9}, 1, marks=pytest.mark.slow),
        pytest.param(None, {"total": 6}, 2, marks=pytest.mark.slow),
        pytest.param(None, {"backward": 9}, 1, marks=pytest.mark.slow),
        pytest.param(12, {"graph": 5}, 2, marks=pytest.mark.slow),
        pytest.param(12, {"backward": 5}, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_primitive_falls_back_to_smaller_parts_in_forward_and_backward(model, budget, limits, warned):
    with PureFloat64():
        scores = linear.score_rows(model, IDS)
        expected = linear.gradients(model, own_loss(*scores))
    named, gradient, shortage = primitive(model, budget, **limits)
    assert linear.relative_error(gradient, expected) <= 1e-12
    assert shortage.failures and shortage.leaks == 0
    assert len(named) == warned and max(named) < max(*limits.values(), 12)
    silent, gradient, shortage = primitive(model, named[-1], **limits)
    assert not silent and not shortage.failures
    assert linear.relative_error(gradient, expected) <= 1e-12
    assert all(p.grad is None for p in model.parameters())


def test_the_primitive_under_reentrant_checkpointing_falls_back_too(monkeypatch):
    monkeypatch.setattr("treetrain.check.first_use.compare_first_use", lambda *_: None)  # it would count calls too
    model = make_model("qwen3", dtype=torch.float64)
    with PureFloat64():
        expected = linear.gradients(model, own_loss(*linear.score_rows(model, IDS)))
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.train()
        calls, handle = [], None

        def fail_once(module, args, out):
            calls.append(torch.is_grad_enabled())
            if len(calls) == 2:  # the layer runs again in backward
                raise ERRORS["cuda"]()

        handle = model.model.layers[0].mlp.register_forward_hook(fail_once)
        loss = own_loss(*tt.logprobs(model, IDS, return_entropy=True))
        with pytest.warns(RuntimeWarning, match="started over"):
            loss.backward()
        handle.remove()
    assert len(calls) > 3 and linear.relative_error(linear.gradients(model), expected) <= 1e-12


def test_the_primitive_keeps_gradients_that_were_there(model):
    with PureFloat64():
        first = own_loss(*tt.logprobs(model, IDS, return_entropy=True))
        first.backward()
        before = linear.gradients(model)
        with Shortage(model, backward=5), pytest.warns(RuntimeWarning):
            own_loss(*tt.logprobs(model, IDS, budget=12, return_entropy=True)).backward()
    assert linear.relative_error(linear.gradients(model), 2 * before) <= 1e-12
