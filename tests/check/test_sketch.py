"""Random sums of gradients: the norm of any difference, in bounded memory."""

import pytest
import torch
from torch import nn

import treetrain as tt
from support.models import make_model
from treetrain.check import sketch as module
from treetrain.check.sketch import sketch, sketch_size, sketched
from treetrain.check.verify import verify
from treetrain.engine import TreeEngine
from treetrain.models.meters import CountStorages

ROWS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 7, 9, 4, 2], [5, 6]]


DIFFERENCES = {
    "noise": torch.randn(200, 256, generator=torch.Generator().manual_seed(5)),
    "constant": torch.ones(200, 256),
    "rank one": torch.outer(torch.linspace(-1, 3, 200), torch.linspace(2, -1, 256)),
    "a column": nn.functional.one_hot(torch.tensor(3), 256).expand(200, 256).float(),
    "an element": nn.functional.one_hot(torch.tensor(31_234), 200 * 256).view(200, 256).float(),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_the_norm_of_any_difference_is_measured(name, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 4096)
    difference, size, seeds = DIFFERENCES[name], 255, 40
    one, squares = torch.randn(200, 256, generator=torch.Generator().manual_seed(0)), []
    for seed in range(seeds):
        apart = sketch(one + difference, size, seed) - sketch(one, size, seed)
        assert apart.shape == (size,)
        squares.append(float(apart.norm() / difference.norm()) ** 2)
    deviation = (2 / size) ** 0.5
    assert torch.tensor(squares).mean() == pytest.approx(1, abs=4 * deviation / seeds**0.5)
    assert torch.tensor(squares).std() <= 1.6 * deviation
    assert max(squares) / min(squares) < 2


def test_a_small_gradient_is_kept_whole_and_sizes_are_bounded():
    gradient = torch.randn(3, 5, dtype=torch.float64)
    assert torch.equal(sketch(gradient, 15, 0), gradient.flatten())
    for count, weights in ((10, 100), (400, 20_000_000), (20_000, 1_500_000)):
        parameters = [nn.Parameter(torch.empty(weights, device="meta")) for _ in range(count)]
        size = sketch_size(parameters)
        assert size * count * 8 <= module.BYTES and 1 <= size <= module.MOST and size % 2
        assert size >= module.LEAST or size * count * 8 > 0.9 * module.BYTES


@pytest.mark.parametrize("streamed", [False, True])
def test_sketches_of_a_call_are_those_of_its_gradients_and_grad_and_hooks_are_left_alone(streamed):
    one, two, frozen = nn.Parameter(torch.randn(40, 40)), nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(3))
    frozen.requires_grad_(False)
    one.grad, seen = torch.full((40, 40), 3.0), []
    one.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    parameters = [one, two, frozen]

    def run():
        (one.sin().sum() * two.sum()).backward()
        (one.square().sum() + two[0]).backward()

    with sketched(parameters, 64, streamed=streamed) as found:
        run()
    expected = one.detach().cos() * two.detach().sum() + 2 * one.detach()
    assert torch.allclose(found[0], sketch(expected, 64, 0), rtol=1e-4, atol=1e-4)
    assert found[1].shape == (7,) and found[1].any() and not found[2].any()
    assert bool((one.grad == 3).all()) and two.grad is None and not seen
    one.sum().backward()
    assert seen == [one] and bool((one.grad == 4).all())


NAMES = [name for name, _ in make_model(tie_word_embeddings=False).named_parameters()]


@pytest.mark.few(6)
@pytest.mark.parametrize("name", [name for name in NAMES if "layers.1" in name or "layers" not in name])
def test_a_wrong_gradient_of_one_tensor_or_one_row_of_it_fails(name, monkeypatch):
    model, original = make_model(tie_word_embeddings=False), TreeEngine.forward_backward
    spoil = [lambda grad: grad.mul_(0.9), lambda grad: grad.mul_(0)]
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        spoil.append(lambda grad: grad[9].mul_(0))
    for change in spoil:

        def spoiled(self, *args, change=change, **kwargs):
            result = original(self, *args, **kwargs)
            change(self.model.get_parameter(name).grad)
            return result

        with monkeypatch.context() as patch:
            patch.setattr(TreeEngine, "forward_backward", spoiled)
            assert not verify(model, ROWS).passed
    assert verify(model, ROWS).passed


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verify_holds_one_gradient_at_a_time_unless_it_compares_all(dtype):
    model = make_model("llama", dtype, hidden_size=128, intermediate_size=512, num_hidden_layers=2)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    reports, peaks = [], []
    for everything in (True, False):
        with CountStorages() as meter:
            reports.append(tt.verify(model, ROWS[:2], all_gradients=everything))
        peaks.append(meter.peak / weights)
    assert all(report.passed for report in reports) and [r.all_gradients for r in reports] == [True, False]
    assert reports[1].gradient_error == pytest.approx(reports[0].gradient_error, rel=0.15)
    norms = [{p.name: p.norm for p in report.parameters} for report in reports]
    assert norms[1] == pytest.approx(norms[0], rel=0.2)
    # In bfloat16 the float32 copy of the model and its gradients are 2 times the weights each.
    assert peaks[1] < (1.8 if dtype is torch.float32 else 4.8) < peaks[0]
