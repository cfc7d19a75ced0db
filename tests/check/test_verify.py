"""`verify`: passes what is exact, fails what is not, leaves the model alone."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import treetrain as tt
from support.models import make_model
from treetrain.check.forests import VOCAB
from treetrain.core.attention import rectangles
from treetrain.engine import TreeEngine


@pytest.fixture
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


@pytest.fixture
def rows() -> list[tt.Trajectory]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 60, 6).tolist()
    return [
        tt.Trajectory(
            prompt + rng.integers(0, 60, 5).tolist(),
            loss_weights=rng.random(11),
            advantages=float(rng.normal()),
            old_logprobs=-4 + rng.random(11) / 3,
        )
        for _ in range(4)
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("loss", [None, tt.losses.ppo(entropy=0.01)], ids=["sft", "ppo"])
def test_an_exact_model_passes_in_every_dtype(model, rows, loss, dtype):
    report = tt.verify(model.to(dtype), rows, loss=loss, temperature=0.8)
    assert report.passed and report.verdict.startswith("exact")
    assert report.gradient_error > 0, "two ways of computing agree to the last bit: was one compared with itself?"
    assert report.loss_tree == pytest.approx(report.loss_linear, rel=2e-2)
    assert (report.linear_error is not None) == (dtype != torch.float64)
    assert report.unique_tokens < report.flat_tokens == 44


def test_every_trainable_parameter_is_reported_worst_first(model, rows):
    model.model.embed_tokens.weight.requires_grad_(False)
    report = tt.verify(model, rows)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {p.name for p in report.parameters} == trainable
    errors = [p.error for p in report.parameters]
    assert errors == sorted(errors, reverse=True)


def test_attention_that_leaks_between_branches_fails(model, rows, monkeypatch):
    original = rectangles.make_schedule

    def leaky(forest, **options):
        ends = np.full_like(forest.ends, len(forest.ends))
        return original(
            rectangles.Forest(
                ends=ends, depth=forest.depth, segment_start=np.array([0, len(ends)]), segment_parent=np.array([-1])
            ),
            **options,
        )

    monkeypatch.setattr(rectangles, "make_schedule", leaky)
    report = tt.verify(model, rows)
    assert not report.passed and "NOT EXACT" in report.verdict and report.gradient_error > 1e-3


def test_a_wrong_gradient_fails_in_bfloat16_too(model, rows, monkeypatch):
    original = TreeEngine.forward_backward

    def spoiled(self, *arguments, **options):
        result = original(self, *arguments, **options)
        for parameter in self.model.parameters():
            parameter.grad.mul_(1.1)
        return result

    monkeypatch.setattr(TreeEngine, "forward_backward", spoiled)
    assert not tt.verify(model.bfloat16(), rows).passed


def test_a_dequantised_model_that_refuses_its_own_float_method_is_verified_in_bfloat16(model, rows):
    model = model.bfloat16()
    model.is_quantized = True  # as after loading from a GGUF file
    with pytest.raises(ValueError, match="not supported for quantized model"):
        model.float()
    assert tt.verify(model, rows).passed


def test_a_model_that_is_trained_to_a_small_loss_passes_and_a_wrong_gradient_of_its_does_not(model, rows, monkeypatch):
    rows = [row.replace(loss_weights=np.arange(11) > 6) for row in rows]  # not where they fork
    optimizer, engine, loss = torch.optim.Adam(model.parameters(), 1e-2), TreeEngine(model), 1.0
    while loss > 0.001:
        optimizer.zero_grad()
        loss = engine.forward_backward(rows, tt.losses.sft()).loss
        optimizer.step()
    for budget in (None, 5):
        report = tt.verify(model, rows, budget=budget)
        assert report.passed and report.loss_tree < 0.001 and report.tolerance == 1e-5, report.verdict
        assert f"the linear run's own error is {report.linear_error:.2e}" in report.verdict
    original = TreeEngine.forward_backward

    def spoiled(self, *arguments, **options):
        result = original(self, *arguments, **options)
        next(p for p in self.model.parameters() if p.grad is not None and p.grad.norm() > 0).grad.mul_(1.01)
        return result

    monkeypatch.setattr(TreeEngine, "forward_backward", spoiled)
    assert not tt.verify(model, rows).passed


def test_a_model_without_float64_is_compared_with_its_rows_directly(model, rows, monkeypatch):
    norm = type(model.model.norm)
    forward = norm.forward

    def no_float64(self, hidden):
        if hidden.dtype == torch.float64:
            raise NotImplementedError("no kernel for float64")
        return forward(self, hidden)

    monkeypatch.setattr(norm, "forward", no_float64)
    report = tt.verify(model, rows)
    assert report.passed and report.linear_error is None and "from each row by itself" in report.verdict


def test_a_wrong_loss_with_right_gradients_is_named_as_such(model, rows, monkeypatch):
    import dataclasses

    original = TreeEngine.forward_backward
    monkeypatch.setattr(
        TreeEngine,
        "forward_backward",
        lambda self, *a, **k: dataclasses.replace(original(self, *a, **k), loss_tensor=1.0),
    )
    report = tt.verify(model, rows)
    assert not report.passed and "the loss is 1 as a tree" in report.verdict


def test_the_users_gradients_are_put_back(model, rows):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    tt.verify(model, rows)
    assert all(bool((p.grad == 3.0).all()) for p in model.parameters())


def test_a_loss_over_the_batch_is_verified_at_once(model, rows):
    class Margin:
        scope = "batch"

        def normaliser(self, trajectories):
            return float(len(trajectories))

        def __call__(self, logprobs, entropies, trajectories):
            sums = torch.stack([row.sum() for row in logprobs])
            return torch.nn.functional.softplus(sums[1:] - sums[:-1]).sum(), {}

    report = tt.verify(model, [row.replace(loss_weights=None) for row in rows], loss=Margin())
    assert report.passed and report.gradient_error > 0


def test_it_takes_rows_as_the_engine_does(model, rows):
    plain = [row.replace(loss_weights=None, advantages=None, old_logprobs=None) for row in rows]
    ids = [row.ids for row in plain]
    expected = tt.verify(model, plain)
    for given in (ids, [row.tolist() for row in ids], list(torch.from_numpy(np.stack(ids))), tt.build_tree(plain)):
        report = tt.verify(model, given)
        assert report.passed and report.loss_tree == expected.loss_tree
        assert (report.trajectories, report.flat_tokens) == (4, 44)


@pytest.mark.parametrize("loss", [tt.losses.ppo(entropy=0.1), tt.losses.dpo(), tt.losses.distill_topk()])
def test_rows_with_sets_of_ids_are_verified(loss):
    rng, rows = np.random.default_rng(0), []
    for number in range(4):
        ids = [*range(6), *rng.integers(6, VOCAB, 5).tolist()]
        sets = [rng.choice(VOCAB, 4, replace=False).tolist() for _ in ids]
        rows.append(
            tt.Trajectory(
                ids,
                advantages=1.0,
                old_logprobs=np.full(11, -1.5),
                ref_logprobs=np.full(11, -1.5),
                sampling_mask=[None, None, *([*({*own} - {x}), x] for own, x in zip(sets[2:], ids[2:]))],
                teacher_topk=(sets, np.full((11, 4), -1.6)),
                pair=number // 2,
                chosen=number % 2 == 0,
            )
        )
    model = make_model("qwen3", dtype=torch.float64)
    report = tt.verify(model, rows, loss=loss, budget=7)
    assert report.passed, report.verdict
    without = tt.verify(model, [row.replace(sampling_mask=None) for row in rows], loss=loss)
    assert isinstance(loss, type(tt.losses.distill_topk())) == (without.loss_linear == report.loss_linear)
