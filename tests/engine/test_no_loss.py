"""A loss that is no loss is refused at the call, with the signature expected and what to do."""

import functools

import pytest
import torch

import treetrain as tt
from support.models import make_model
from treetrain.check.bench import bench
from treetrain.check.linear import gradients

ROWS = [[1, 2, 3, 4], [1, 2, 5], [7]]


def takes_logits(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels)


def right(logprobs, entropies, trajectory):
    return -logprobs.sum(), {"nll": -logprobs.mean().item() if len(logprobs) else 0.0}


class Own:
    def normaliser(self, trajectories):
        return float(len(trajectories))

    def __call__(self, logprobs, entropies, trajectory):
        return right(logprobs, entropies, trajectory)


class OfTheBacth(Own):
    scope = "bacth"


class ValuesUnnamed(Own):
    needs = ("predicted_values",)


class Needing(Own):
    needs = ("logprobs", "surprise")


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3")


NO_LOSS = {
    "sft": r"loss='sft' is a name; pass tt.losses.by_name\('sft'\)",
    torch.zeros(()): r"tensor of shape \(\); the engine calls the loss itself.*tt.logprobs\(model, rows\)",
    tt.losses.grpo: r"the class GRPOLoss; pass an instance of it, GRPOLoss\(\)",
    Own: r"the class Own; pass an instance of it, Own\(\)",
    3.5: r"loss is 3.5, which cannot be called; a loss is called as loss\(logprobs, entropies, trajectory\)",
    takes_logits: r"takes_logits\(logits, labels\) does not take \(logprobs, entropies, trajectory\)",
    functools.partial(right, None): "does not take",
    torch.nn.CrossEntropyLoss(): "CrossEntropyLoss.*does not take",
    OfTheBacth(): "scope 'bacth'; give 'trajectory'.* or 'batch'",
    Needing(): r"needs 'surprise'; a loss may need logprobs, entropies, id_logprobs, predicted_values, advantages, ",
    ValuesUnnamed(): "and with values=... as it needs predicted values",
    right: r"loss right has no normaliser\(trajectories\)",
}


@pytest.mark.parametrize("call", ["forward_backward", "verify", "bench"])
@pytest.mark.parametrize("loss, message", NO_LOSS.items(), ids=lambda given: getattr(given, "__name__", None))
def test_what_is_no_loss_is_refused_before_any_work(model, monkeypatch, loss, message, call):
    calls = {
        "forward_backward": lambda: tt.TreeEngine(model).forward_backward(ROWS, loss),
        "verify": lambda: tt.verify(model, [tt.Trajectory(row) for row in ROWS], loss=loss),
        "bench": lambda: bench(model, [tt.Trajectory(row) for row in ROWS], loss=loss),
    }
    monkeypatch.setattr(type(model.model.embed_tokens), "forward", lambda *_, **__: pytest.fail("the model ran"))
    with pytest.raises(TypeError, match=message):
        calls[call]()


def returning(value):
    """A loss of the protocol that returns what `value` makes of the sum."""

    class Returning(Own):
        def __call__(self, logprobs, entropies, trajectory):
            return value(logprobs)

    return Returning()


RETURNS = {
    "alone": (
        lambda x: x.sum(),
        r"a tensor of shape \(\), no pair",
    ),
    "three": (lambda x: (x.sum(), {}, None), "a tuple, no pair"),
    "nothing": (lambda x: None, "None, no pair"),
    "a loss": (lambda x: tt.losses.sft(), "no pair"),
    "per token": (lambda x: (x, {}), r"a tensor of shape \(3,\) as its sum, no scalar; add it up"),
    "one entry": (lambda x: (x.sum(0, keepdim=True), {}), r"a tensor of shape \(1,\) as its sum, no scalar"),
    "item": (lambda x: (x.sum().item(), {}), "a float as its sum, which has no gradient; return a scalar tensor"),
    "no sum": (lambda x: (None, {}), "None as its sum"),
    "metrics": (lambda x: (x.sum(), x.sum()), "as its metrics; give a dict"),
    "wide metric": (lambda x: (x.sum(), {"nll": x}), r"a tensor of shape \(3,\) as the metric 'nll'; give its mean"),
}


@pytest.mark.parametrize("scope", ["trajectory", "batch"])
@pytest.mark.parametrize("value, message", RETURNS.values(), ids=RETURNS)
def test_what_a_loss_must_not_return_is_refused_by_name_and_leaves_no_gradient(model, value, message, scope):
    model.zero_grad()
    loss = returning(value if scope == "trajectory" else lambda rows: value(rows[0]))
    loss.scope = scope
    with pytest.raises(TypeError, match=f"loss Returning returned.*{message}"):
        tt.TreeEngine(model).forward_backward(ROWS, loss)
    assert all(p.grad is None for p in model.parameters())


def test_a_plain_function_is_a_loss_with_a_normaliser_given_or_its_own(model):
    model.zero_grad()
    tt.TreeEngine(model).forward_backward(ROWS, right, normaliser=3.0)
    given = gradients(model)

    def own(logprobs, entropies, trajectory):
        return right(logprobs, entropies, trajectory)

    own.normaliser = lambda trajectories: float(len(trajectories))
    model.zero_grad()
    tt.TreeEngine(model).forward_backward(ROWS, own)
    assert torch.equal(given, gradients(model)) and given.any()
    assert tt.verify(model, [tt.Trajectory(row) for row in ROWS], loss=own).passed


def test_what_a_users_loss_needs_is_given_and_checked_before_any_work(model, monkeypatch):
    class Weighted(Own):
        needs = ("logprobs", "entropies", "advantages")

        def __call__(self, logprobs, entropies, trajectory):
            assert entropies.shape == logprobs.shape
            return -(torch.from_numpy(trajectory.advantages[1:]).to(logprobs) * logprobs).sum(), {}

    rows = [tt.Trajectory(row, advantages=1.0) for row in ROWS]
    model.zero_grad()
    tt.TreeEngine(model).forward_backward(rows, Weighted())
    given = gradients(model)
    model.zero_grad()
    tt.TreeEngine(model).forward_backward(ROWS, right, normaliser=3.0)
    torch.testing.assert_close(given, gradients(model), rtol=1e-5, atol=1e-7)
    monkeypatch.setattr(type(model.model.embed_tokens), "forward", lambda *_, **__: pytest.fail("the model ran"))
    with pytest.raises(tt.DataError, match=r"trajectory number 1 \(from 0\) has no advantages, which the loss needs"):
        tt.TreeEngine(model).forward_backward([rows[0], rows[1].replace(advantages=None)], Weighted())
