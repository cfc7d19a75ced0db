"""`treetrain.logprobs`: what autograd may do with it, and what it refuses."""

import pytest
import torch
from hypothesis import given

import treetrain as tt
from support.models import make_model
from support.shapes import unchecked
from treetrain.check import linear
from treetrain.check.contract import PureFloat64
from treetrain.check.forests import forests, runs

# Forks stay forks when the last tokens, which predict nothing, are left out.
ROWS = [[1, 2, 3, 4, 5], [1, 2, 3, 6, 8], [1, 2, 3, 6, 8], [1], [], [9, 8, 7], [9, 8, 7, 7, 2], [4, 4]]


def own_loss(logps, entropies=None):
    """A user's loss over several rows at once, which no sum over trajectories can express."""
    sums = torch.stack([row.sum() for row in logps])
    loss = torch.nn.functional.softplus(sums[0] - sums[1]) + (sums.logsumexp(0) - sums[-1]) ** 2
    return loss if entropies is None else loss + sum((row**2).sum() for row in entropies)


def expected(model, rows, *, temperature=1.0, entropy=False):
    logps, entropies = linear.score_rows(model, rows, temperature)
    loss = own_loss(logps, entropies if entropy else None)
    return logps, entropies, linear.gradients(model, loss)


@pytest.fixture
def model():
    return make_model("qwen3", dtype=torch.float64)


@pytest.mark.parametrize("budget", [None, 12, 3])
@pytest.mark.parametrize("entropy", [False, True])
def test_backward_of_a_users_own_loss_gives_the_gradients_of_the_rows(model, budget, entropy):
    with PureFloat64():
        logps, entropies, gradient = expected(model, ROWS, temperature=0.8, entropy=entropy)
        got = tt.logprobs(model, ROWS, budget=budget, temperature=0.8, return_entropy=entropy)
        rows, entropy_rows = got if entropy else (got, None)
        own_loss(rows, entropy_rows).backward()
    for row, other in zip(rows, logps):
        torch.testing.assert_close(row, other, rtol=1e-12, atol=1e-12)
    if entropy:
        for row, other in zip(entropy_rows, entropies):
            torch.testing.assert_close(row, other, rtol=1e-12, atol=1e-12)
    assert linear.relative_error(linear.gradients(model), gradient) <= 1e-12


@pytest.mark.parametrize("budget", [None, 12, 3])
def test_autograd_grad_gives_the_same_and_leaves_grad_alone(model, budget):
    with PureFloat64():
        _, _, gradient = expected(model, ROWS)
        loss = own_loss(tt.logprobs(model, ROWS, budget=budget))
        got = linear.gradients(model, loss)
    assert linear.relative_error(got, gradient) <= 1e-12
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
@runs(20)
@given(forests())
def test_random_forests_under_a_budget_equal_the_rows(rows):
    model = make_model("llama", dtype=torch.float64)
    tree = tt.build_tree(rows)
    sizes = [tree.end[root] - root for root in range(tree.num_tokens) if tree.parent[root] < 0]
    with PureFloat64():
        logps = tt.logprobs(model, rows, budget=max(sizes, default=1))
        reference, _ = linear.score_rows(model, rows)
        for row, other in zip(logps, reference):
            torch.testing.assert_close(row, other, rtol=1e-11, atol=1e-11)
        if any(len(row) > 1 for row in rows):
            gradient = linear.gradients(model, sum((row**2).sum() for row in reference))
            got = linear.gradients(model, sum((row**2).sum() for row in logps))
            assert linear.relative_error(got, gradient) <= 1e-12


@pytest.mark.parametrize("budget", [None, 12, 3])
def test_a_second_backward_raises(model, budget):
    loss = own_loss(tt.logprobs(model, ROWS, budget=budget))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


@pytest.mark.parametrize("budget", [None, 12, 3])
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_changed_before_backward_raise(model, budget, frozen):
    weight = model.model.layers[0].mlp.up_proj.weight.requires_grad_(not frozen)
    loss = own_loss(tt.logprobs(model, ROWS, budget=budget))
    with torch.no_grad():
        weight.mul_(1.01)
    with pytest.raises(RuntimeError, match="weights have changed"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("way", ["fused", "data"])
@pytest.mark.parametrize("budget", [None, 12, 3])
def test_changes_that_version_counters_miss_raise_too(budget, way):
    model = make_model("qwen3")
    loss = own_loss(tt.logprobs(model, ROWS, budget=budget))
    versions = [p._version for p in model.parameters()]
    if way == "fused":
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True).step()
        model.zero_grad()
    else:
        model.model.norm.weight.data[0] += 1e-3
    assert versions == [p._version for p in model.parameters()]
    with pytest.raises(RuntimeError, match="weights have changed"):
        loss.backward()


def with_two_adapters(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config, adapter_name="first")
    wrapped.add_adapter("second", config)
    wrapped.set_adapter("first")
    return wrapped


SWITCHES = {
    "another adapter": (
        lambda model: model.set_adapter("second"),
        r"active_adapter of .* was .*first.* is .*second|requires_grad of .* was True",
    ),
    "no adapter": (
        lambda model: model.base_model.disable_adapter_layers(),
        "disable_adapters of .* was False|requires_grad of .* was True",
    ),
    "a merged adapter": (lambda model: model.merge_adapter(), "weights have changed"),
    "another scale": (
        lambda model: model.base_model.model.model.layers[0].self_attn.q_proj.scale_layer(2.0),
        r"scaling of .*layers\.0\.self_attn\.q_proj was",
    ),
}


@pytest.mark.parametrize("budget", [None, 12, 3])
@pytest.mark.parametrize("name", SWITCHES)
def test_adapters_switched_before_backward_raise_and_switched_back_do_not(name, budget):
    switch, says = SWITCHES[name]
    model = with_two_adapters(make_model("qwen3", dtype=torch.float64))
    if name == "another scale" and budget != 3:  # a kept graph reads no setting again, as in plain autograd
        with PureFloat64():
            expected = linear.gradients(model, own_loss(linear.score_rows(model, ROWS)[0]))
            loss = own_loss(tt.logprobs(model, ROWS, budget=budget))
            switch(model)
            loss.backward()
        assert linear.relative_error(linear.gradients(model), expected) <= 1e-12
        return
    loss = own_loss(tt.logprobs(model, ROWS, budget=budget))
    switch(model)
    with pytest.raises(RuntimeError, match=says):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", [None, 3])
def test_an_adapter_that_is_active_again_in_backward_is_fine(budget):
    model = with_two_adapters(make_model("qwen3", dtype=torch.float64))
    with PureFloat64():
        expected = linear.gradients(model, own_loss(linear.score_rows(model, ROWS)[0]))
        logprobs = tt.logprobs(model, ROWS, budget=budget)
        with torch.no_grad(), model.disable_adapter():
            reference = tt.logprobs(model, ROWS, budget=budget)
        model.set_adapter("second")
        model.set_adapter("first")
        own_loss(logprobs).backward()
    assert linear.relative_error(linear.gradients(model), expected) <= 1e-12
    assert not any(row.requires_grad for row in reference)


@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize("before", [False, True])
def test_requires_grad_switched_before_backward_raises(model, budget, before):
    weight = model.model.layers[0].mlp.up_proj.weight.requires_grad_(before)
    loss = own_loss(tt.logprobs(model, ROWS, budget=budget))
    weight.requires_grad_(not before)
    with pytest.raises(RuntimeError, match=rf"layers.0.mlp.up_proj.weight was {before} and is {not before}"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())


def test_without_gradients_no_graph_is_kept_and_values_are_the_same(model):
    live = tt.logprobs(model, ROWS)
    with torch.no_grad():
        still = tt.logprobs(model, ROWS)
    assert all(row.requires_grad for row in live if len(row)) and not any(row.requires_grad for row in still)
    assert all(torch.equal(a, b) for a, b in zip(live, still))
    model.requires_grad_(False)
    assert not any(row.requires_grad for row in tt.logprobs(model, ROWS))


@pytest.mark.parametrize("rows", [[], [[]], [[5]], [[5], [], [5]]])
def test_rows_without_predictions_give_empty_tensors(model, rows):
    got, entropies = tt.logprobs(model, rows, return_entropy=True)
    assert [len(row) for row in got] == [len(row) for row in entropies] == [0] * len(rows)


def test_ids_may_be_arrays_tensors_trajectories_or_a_tree(model):
    rows = [[1, 2, 3], [1, 2, 4, 5]]
    plain = tt.logprobs(model, rows)
    trajectories = [tt.Trajectory(row) for row in rows]
    for other in ([torch.tensor(row) for row in rows], trajectories, tt.build_tree(rows)):
        assert all(torch.equal(a, b) for a, b in zip(plain, tt.logprobs(model, other)))


def test_dtypes_are_float32_or_wider():
    assert tt.logprobs(make_model(dtype=torch.bfloat16), [[1, 2]])[0].dtype == torch.float32
    assert tt.logprobs(make_model(dtype=torch.float64), [[1, 2]])[0].dtype == torch.float64


def test_only_some_rows_in_the_loss_is_fine(model):
    with PureFloat64():
        reference, _ = linear.score_rows(model, ROWS)
        gradient = linear.gradients(model, reference[1].sum())
        tt.logprobs(model, ROWS, budget=12)[1].sum().backward()
    assert linear.relative_error(linear.gradients(model), gradient) <= 1e-12


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_not_above_zero_raises(model, bad):
    with pytest.raises(ValueError, match="temperature"):
        tt.logprobs(model, ROWS, temperature=bad)
    with pytest.raises(ValueError, match="temperature"):
        tt.TreeEngine(model, temperature=bad)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padded_batches_convert_both_ways(model, side):
    rows = [[1, 2, 3, 4], [1, 2, 9], [7], [1, 2, 3, 4, 5, 6], []]
    width = 8
    room = [width - len(row) for row in rows]
    left = {"left": room, "right": [0] * 5, "both": [r // 2 for r in room]}[side]
    ids, mask = torch.zeros(5, width, dtype=torch.long), torch.zeros(5, width, dtype=torch.long)
    for b, row in enumerate(rows):
        ids[b, left[b] : left[b] + len(row)] = torch.tensor(row, dtype=torch.long)
        mask[b, left[b] : left[b] + len(row)] = 1
    advantages = torch.arange(5 * width, dtype=torch.float32).view(5, width)
    trajectories = tt.from_padded(ids, mask, advantages=advantages)
    assert [t.ids.tolist() for t in trajectories] == rows
    assert trajectories[1].advantages.tolist() == advantages[1, left[1] : left[1] + 3].tolist()
    with PureFloat64():
        padded = tt.to_padded(tt.logprobs(model, trajectories), mask, fill=-7.0)
        reference, _ = linear.score_rows(model, rows)
        for b, row in enumerate(rows):
            start = left[b]
            own = padded[b, start : start + max(len(row) - 1, 0)]
            torch.testing.assert_close(own, reference[b], rtol=1e-12, atol=1e-12)
        assert int((padded == -7.0).sum()) == padded.numel() - sum(max(len(row) - 1, 0) for row in rows)
        assert padded.shape == (5, width - 1)
        gradient = linear.gradients(model, sum((row**2).sum() for row in reference))
        got = linear.gradients(model, (padded * (padded != -7.0)).square().sum())
    assert linear.relative_error(got, gradient) <= 1e-12


def test_padded_batches_that_do_not_fit_are_refused():
    ids = torch.ones(2, 4, dtype=torch.long)
    with unchecked(), pytest.raises(tt.DataError, match="must be"):
        tt.from_padded(ids, torch.ones(2, 3))
    with pytest.raises(tt.DataError, match="column 1"):
        tt.from_padded(ids, torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]]))
    with pytest.raises(tt.DataError, match="advantages"):
        tt.from_padded(ids, torch.ones(2, 4), advantages=torch.zeros(2, 2))


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_to_padded_gives_goes_back_in_as_a_fact(model, side):
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, : 2 if side == "left" else None] = 0
    if side == "right":
        mask[1] = torch.tensor([1, 1, 1, 1, 0, 0])
    ids = torch.arange(12).view(2, 6)
    rows = tt.from_padded(ids, mask)
    old = tt.to_padded([row.detach() for row in tt.logprobs(model, rows)], mask)
    back = tt.from_padded(ids, mask, old_logprobs=torch.nn.functional.pad(old, (1, 0)))
    for row, logps in zip(back, tt.logprobs(model, rows)):
        assert row.old_logprobs is not None
        torch.testing.assert_close(torch.tensor(row.old_logprobs[1:]), logps.detach().double())
    with pytest.raises(tt.DataError, match="row 0"):
        tt.to_padded([torch.zeros(2), torch.zeros(3)], torch.ones(2, 4))
