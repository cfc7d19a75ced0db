"""`TreeEngine`: accumulation, budgets, users' own losses, metrics, reports."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from hypothesis import given

import treetrain as tt
from support.models import make_model
from support.passes import unnoticed
from treetrain.check import linear
from treetrain.check.contract import PureFloat64
from treetrain.check.forests import runs, trajectories, with_random_facts
from treetrain.check.linear_engine import LinearEngine
from treetrain.core.losses.facts import add_metrics

IDS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 7, 8], [1, 9], [4], [], [9, 8, 7], [9, 8, 7, 7, 2], [5, 5, 5]]
ROWS = with_random_facts(IDS, 5)
PPO = tt.losses.ppo(entropy=0.05)
LOSSES = {"sft": tt.losses.sft(), "sft per trajectory": tt.losses.sft(reduction="trajectory"), "ppo": PPO}
engines = pytest.mark.parametrize("engine", [tt.TreeEngine, LinearEngine])


@pytest.fixture
def model():
    return make_model("qwen3", dtype=torch.float64)


def run(model, rows, loss, *, engine=tt.TreeEngine, **options):
    """Result and gradient of one call on fresh gradients."""
    model.zero_grad()
    normaliser = options.pop("normaliser", None)
    with PureFloat64():
        result = engine(model, **options).forward_backward(rows, loss, normaliser)
    return result, linear.gradients(model)


@engines
def test_gradients_are_added_to_those_that_are_there(model, engine):
    _, first = run(model, ROWS, PPO, engine=engine)
    with PureFloat64():
        engine(model).forward_backward(ROWS, PPO)
    assert linear.relative_error(linear.gradients(model), 2 * first) <= 1e-12


@engines
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_may_be_split_over_calls_that_share_the_normaliser(model, engine, loss):
    whole, gradient = run(model, ROWS, LOSSES[loss], engine=engine)
    normaliser = LOSSES[loss].normaliser(ROWS)
    model.zero_grad()
    results = []
    with PureFloat64():
        for rows in (ROWS[:2], ROWS[2:7], ROWS[7:]):
            results.append(engine(model).forward_backward(rows, LOSSES[loss], normaliser))
    assert linear.relative_error(linear.gradients(model), gradient) <= 1e-12
    assert sum(r.loss for r in results) == pytest.approx(whole.loss, rel=1e-12)
    added = functools.reduce(add_metrics, [r.metric_sums for r in results])
    for name, (total, weight) in whole.metric_sums.items():
        assert float(added[name][0]) == pytest.approx(float(total), rel=1e-10, abs=1e-12)
        assert float(added[name][1]) == pytest.approx(float(weight), rel=1e-10)


@runs(25)
@given(trajectories(max_rows=10))
def test_budgets_on_random_forests_equal_one_part(rows):
    model = make_model("llama", dtype=torch.float64)
    tree = tt.build_tree(rows)
    largest = max(int(tree.end[root]) - root for root in np.flatnonzero(tree.parent < 0))
    _, gradient = run(model, rows, PPO)
    _, got = run(model, rows, PPO, budget=largest)
    assert linear.relative_error(got, gradient) <= 1e-12
    old = tt.TreeEngine(model, budget=largest).logprobs(rows)
    for a, b in zip(old, tt.TreeEngine(model).logprobs(rows)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_the_linear_engine_packs_rows_and_shares_nothing(model):
    result, gradient = run(model, ROWS, PPO, engine=LinearEngine, pack_tokens=7)
    whole, expected = run(model, ROWS, PPO, engine=LinearEngine)
    assert result.parts > whole.parts == 1
    assert linear.relative_error(gradient, expected) <= 1e-12
    assert whole.unique_tokens == whole.flat_tokens == sum(len(row) for row in ROWS)
    # A tree that is given is taken apart again.
    again, _ = run(model, tt.build_tree(ROWS), PPO, engine=LinearEngine)
    assert again.computed_tokens == whole.computed_tokens
    tokens = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: tokens.append(args[0].numel()))
    LinearEngine(model).logprobs(tt.build_tree(ROWS))
    assert sum(tokens) >= sum(len(row) - 1 for row in ROWS if len(row) > 1)


def test_the_tree_engine_computes_every_shared_token_once(model):
    tokens = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: tokens.append(args[0].numel()))
    rows = [tt.Trajectory(ids) for ids in IDS]
    result = tt.TreeEngine(model).forward_backward(rows, tt.losses.sft())
    assert sum(tokens) == result.computed_tokens <= result.unique_tokens == tt.build_tree(IDS).num_tokens
    # Last tokens predict nothing: 6, 8, 9 of the first tree, 4, 2 of the second, 5 of the third.
    assert result.unique_tokens - result.computed_tokens == 6


def test_rows_of_different_key_are_not_merged_and_give_the_same_gradients(model):
    keyed = [row.replace(key=k % 2) for k, row in enumerate(ROWS)]
    plain, gradient = run(model, ROWS, PPO)
    apart, got = run(model, keyed, PPO)
    assert apart.unique_tokens > plain.unique_tokens
    assert linear.relative_error(got, gradient) <= 1e-12


@dataclasses.dataclass
class PerRow:
    """A user's own loss of trajectory scope: a plain function of one row."""

    needs_entropy: bool = False
    scope = "trajectory"

    @property
    def needs(self):
        return ("logprobs", "entropies") if self.needs_entropy else ("logprobs",)

    def normaliser(self, rows):
        return float(len(rows))

    def __call__(self, logprobs, entropies, trajectory):
        assert (entropies is None) != self.needs_entropy
        assert len(logprobs) == max(len(trajectory) - 1, 0)
        # On purpose not masked: a user's loss may train any token, whatever the loss weights say.
        total = logprobs.square().sum()
        if self.needs_entropy:
            total = total + entropies.sum() * 0.1
        return total, {"mean": (logprobs.sum(), len(logprobs)), "rows": 1.0}


class Pairs:
    """A user's own loss of batch scope: rows compared with each other, as DPO does."""

    scope = "batch"

    def normaliser(self, rows):
        return 3.0

    def __call__(self, logprobs, entropies, rows):
        assert entropies is None and len(logprobs) == len(rows)
        weights = [torch.tensor(row.weights[1:]) for row in rows]
        sums = [(a * w).sum() for a, w in zip(logprobs, weights)]
        total = torch.nn.functional.softplus(sums[0] - sums[1]) + torch.nn.functional.softplus(sums[6] - sums[7])
        return total, {"margin": (sums[0] - sums[1]).detach()}


@engines
@pytest.mark.parametrize("loss", [PerRow(), PerRow(True), Pairs()], ids=["row", "row with entropy", "batch"])
def test_a_users_own_loss_gets_the_gradients_of_the_rows(model, engine, loss):
    with PureFloat64():
        logps, entropies = linear.score_rows(model, [row.ids.tolist() for row in ROWS])
        if loss.scope == "batch":
            total = loss(logps, None, ROWS)[0]
        else:
            given = entropies if loss.needs_entropy else [None] * len(ROWS)
            total = sum(loss(a, h, row)[0] for a, h, row in zip(logps, given, ROWS))
        expected = linear.gradients(model, total / loss.normaliser(ROWS))
    result, gradient = run(model, ROWS, loss, engine=engine)
    assert linear.relative_error(gradient, expected) <= 1e-12
    assert result.loss == pytest.approx(float(total.detach()) / loss.normaliser(ROWS), rel=1e-12)
    assert result.metrics.get("rows", 1.0) == 1.0


def test_a_loss_over_the_batch_runs_in_two_phases_under_a_budget(model):
    whole, gradient = run(model, ROWS, Pairs())
    calls = []
    handle = model.lm_head.register_forward_hook(unnoticed(lambda *_: calls.append(torch.is_grad_enabled())))
    cut, got = run(model, ROWS, Pairs(), budget=4)
    handle.remove()
    assert whole.parts == 1 < cut.parts and cut.loss == pytest.approx(whole.loss, rel=1e-12)
    assert linear.relative_error(got, gradient) <= 1e-12
    again = len(calls) - cut.parts  # the parts whose graph was not kept while the others were scored
    assert 0 < again < cut.parts and sum(calls[: cut.parts]) == cut.parts - again and all(calls[cut.parts :])


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_normaliser_that_is_not_above_zero_is_refused_before_any_gradient(model, bad):
    with pytest.raises(ValueError, match="normaliser"):
        tt.TreeEngine(model).forward_backward(ROWS, tt.losses.sft(), normaliser=bad)
    assert all(p.grad is None for p in model.parameters())


def test_a_missing_fact_is_an_error_before_any_gradient_also_with_a_normaliser_given(model):
    rows = [*ROWS, tt.Trajectory([30, 31, 32])]
    with pytest.raises(tt.DataError, match="has no"):
        tt.TreeEngine(model, budget=20).forward_backward(rows, PPO, normaliser=1.0)
    assert all(p.grad is None for p in model.parameters())


def test_nothing_to_train_is_said_at_once(model):
    with torch.no_grad(), pytest.raises(ValueError, match="no_grad"):
        tt.TreeEngine(model).forward_backward(ROWS, tt.losses.sft())
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="frozen"):
        tt.TreeEngine(model).forward_backward(ROWS, tt.losses.sft())


@pytest.mark.parametrize("loss", [tt.losses.sft(), PPO], ids=["sft", "ppo"])
def test_a_head_whose_forward_was_replaced_is_called_and_not_bypassed(loss):
    model = make_model("qwen3")
    plain = model.lm_head.forward
    model.lm_head.forward = lambda hidden: plain(hidden) * 0.5
    report = tt.verify(model, ROWS, loss=loss)
    assert report.passed, report.verdict
    assert model.lm_head.forward is not plain


def test_logprobs_of_the_engine_are_those_of_training_and_make_ratios_of_one(model):
    model = make_model("qwen3")
    engine = tt.TreeEngine(model, temperature=0.8)
    rows = [row.replace(loss_weights=None) for row in ROWS]
    old, entropies = engine.logprobs(rows, return_entropy=True)
    reference = linear.score_rows(model, [row.ids.tolist() for row in rows], 0.8)
    for a, b in zip(old + entropies, reference[0] + reference[1]):
        assert not a.requires_grad
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    rows = [
        row.replace(old_logprobs=np.concatenate([np.zeros(min(len(row), 1)), value.double().numpy()]))
        for row, value in zip(rows, old)
    ]
    result = engine.forward_backward(rows, tt.losses.ppo())
    assert result.metrics["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert result.metrics["clip_fraction"] == 0.0


def test_many_head_chunks_give_the_same_as_one(model, monkeypatch):
    from treetrain.core.head import lm_head

    results = [run(model, ROWS, loss) for loss in LOSSES.values()]
    rows = tt.logprobs(model, IDS)
    for size in (1, 2, 5):
        monkeypatch.setattr(lm_head, "head_chunk_rows", lambda vocabulary, device, size=size: size)
        for (whole, gradient), loss in zip(results, LOSSES.values()):
            result, got = run(model, ROWS, loss)
            assert linear.relative_error(got, gradient) <= 1e-12
            assert result.loss == pytest.approx(whole.loss, rel=1e-12)
        for a, b in zip(rows, tt.logprobs(model, IDS)):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_head_with_a_bias_is_exact():
    # Phi's head has one; temperature and entropy act on the biased logits.
    model = make_model("phi", dtype=torch.float64)
    assert model.lm_head.bias.abs().sum() > 0
    with PureFloat64():
        scores = linear.score_rows(model, [row.ids.tolist() for row in ROWS], 0.6)
        loss = linear.batch_loss(scores, ROWS, lambda a, h, f: linear.clipped(a, f, 0.2, 0.2) - 0.05 * h)
        expected = linear.gradients(model, loss)
        model.zero_grad()
        tt.TreeEngine(model, temperature=0.6).forward_backward(ROWS, PPO)
    assert linear.relative_error(linear.gradients(model), expected) <= 1e-12
