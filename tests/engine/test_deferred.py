"""No gradient is lost between a loss and its tree: `.grad` waits, and says so to whoever reads, clips or steps."""

import copy
import gc
import weakref

import pytest
import torch

import treetrain as tt
from support.models import make_model

ROWS = [[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 3], [5, 6, 7, 8], [5, 4, 2, 2]]


@pytest.fixture
def model():
    return make_model()


def loss_of(scored):
    return sum((row * torch.arange(1.0, len(row) + 1)).sum() for row in scored.logprobs)


def plain_gradients(model, rows=ROWS):
    model = copy.deepcopy(model)
    loss_of_rows(model, rows).backward()
    return [p.grad for p in model.parameters()]


def loss_of_rows(model, rows=ROWS):
    total = 0.0
    for row in rows:
        ids = torch.tensor([row])
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        total = total + (logprobs * torch.arange(1.0, len(row))).sum()
    return total


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_forgotten_backward_is_an_error_when_an_optimizer_steps(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    scored = tt.TreeEngine(model).score(ROWS)
    loss_of(scored).backward()
    with pytest.raises(RuntimeError, match=r"TreeEngine\.score.*scored\.backward\(\).*zero_grad"):
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items()) and not optimizer.state
    scored.backward()
    assert_same([p.grad for p in model.parameters()], plain_gradients(model))
    optimizer.step()


def test_a_forgotten_backward_is_an_error_even_if_nothing_else_is_left_of_the_score(model):
    optimizer = torch.optim.SGD(model.parameters())
    loss_of(tt.TreeEngine(model).score(ROWS)).backward()
    gc.collect()
    with pytest.raises(RuntimeError, match=r"scored\.backward"):
        optimizer.step()


@pytest.mark.parametrize(
    "use",
    [
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model: next(model.parameters()).grad.norm(),
        lambda model: next(model.parameters()).grad.numpy(),
        lambda model: next(model.parameters()).grad.data,
        lambda model: next(model.parameters()).grad.clone(),
        lambda model: float(next(model.parameters()).grad.sum()),
        lambda model: repr(next(model.parameters()).grad),
        lambda model: torch.save(next(model.parameters()).grad, "/dev/null"),
        lambda model: torch.optim.LBFGS(model.parameters()).step(lambda: torch.tensor(0.0)),
        lambda model: [p.data.add_(p.grad, alpha=-0.1) for p in model.parameters()],
    ],
    ids=["norm", "clip_value", "read", "numpy", "data", "clone", "sum", "repr", "save", "closure", "by_hand"],
)
def test_gradients_that_wait_cannot_be_read_before_their_backward(model, use):
    scored = tt.TreeEngine(model).score(ROWS)
    loss_of(scored).backward()
    with pytest.raises(RuntimeError, match="have not gone through the tree"):
        use(model)
    scored.backward()
    use(model)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("by", ["model", "optimizer"])
def test_gradients_that_wait_are_dropped_by_zero_grad_and_remembered_by_nobody(model, by, set_to_none):
    optimizer, engine = torch.optim.SGD(model.parameters()), tt.TreeEngine(model)
    scored = engine.score(ROWS)
    loss_of(scored).backward()
    (model if by == "model" else optimizer).zero_grad(set_to_none=set_to_none)  # this batch is skipped
    gone = weakref.ref(scored)
    del scored
    gc.collect()
    assert gone() is None
    optimizer.step()
    scored = engine.score(ROWS)
    loss_of(scored).backward()
    scored.backward()
    assert_same([p.grad for p in model.parameters()], plain_gradients(model))
    optimizer.step()


def test_a_score_that_is_dropped_unused_holds_no_memory(model):
    engine, alive = tt.TreeEngine(model), []
    for _ in range(3):
        scored = engine.score(ROWS)
        loss_of(scored).backward()
        alive.append(weakref.ref(scored))
    del scored
    gc.collect()
    assert not any(each() for each in alive)


def test_gradients_wait_for_two_trees_while_weights_are_released_between_passes(model):
    engine, weights = tt.TreeEngine(model), list(model.parameters())
    expected = [2 * grad for grad in plain_gradients(model)]
    scored, whole = [engine.score(ROWS), engine.score(ROWS)], [p.data for p in weights]
    for p in weights:  # as ZeRO-3 does, which gathers them for the next pass
        p.data = p.data.new_empty(0)
    for one in scored:
        loss_of(one).backward()
    for p, data in zip(weights, whole):
        p.data = data
    for one in scored:
        one.backward()
    assert_same([p.grad for p in weights], expected)


def test_gradients_wait_beside_others_that_accumulate(model):
    engine, parameters = tt.TreeEngine(model), list(model.parameters())
    penalty = sum(p.square().sum() for p in parameters)
    first, second = engine.score(ROWS[:2]), engine.score(ROWS[2:])
    loss_of(first).backward()
    penalty.backward()  # autograd adds to .grad while gradients wait
    (loss_of(second) + sum(p.square().sum() for p in parameters)).backward()
    first.backward()
    with pytest.raises(RuntimeError, match="have not gone through"):
        parameters[0].grad.sum()
    second.backward()
    assert all(type(p.grad) is torch.Tensor for p in parameters)
    expected = [g + 4 * p.detach() for g, p in zip(plain_gradients(model), parameters)]
    assert_same([p.grad for p in parameters], expected)


@pytest.mark.parametrize("add", [lambda p, q: p.grad.add_(q.grad), lambda p, q: p.grad.__iadd__(q.grad)])
def test_a_waiting_gradient_that_is_added_to_another_takes_nothing_away(model, add):
    p, q = model.model.layers[0].input_layernorm.weight, model.model.layers[1].input_layernorm.weight
    names = [name for each in (p, q) for name, parameter in model.named_parameters() if parameter is each]
    plain = dict(zip(dict(model.named_parameters()), plain_gradients(model)))
    scored = tt.TreeEngine(model).score(ROWS)
    scored.deferral.settle = scored.backward
    loss_of(scored).backward()
    add(p, q)
    assert_same([p.grad, q.grad], [plain[names[0]] + plain[names[1]], plain[names[1]]])


def test_a_plain_backward_and_a_step_of_the_engine_may_come_while_gradients_wait(model):
    engine = tt.TreeEngine(model)
    scored = engine.score(ROWS[:2])
    loss_of(scored).backward()
    loss_of_rows(model, ROWS[2:]).backward()
    engine.forward_backward(ROWS, lambda logprobs, entropies, row: (logprobs.sum(), {}), normaliser=1.0)
    scored.backward()
    found = [p.grad for p in model.parameters()]
    other = copy.deepcopy(model)
    other.zero_grad()
    loss_of_rows(other).backward()
    for row in ROWS:
        ids = torch.tensor([row])
        other(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).sum().backward()
    assert_same(found, [p.grad for p in other.parameters()])


def test_a_backward_that_fails_is_an_error_when_an_optimizer_steps_without_it(model, monkeypatch):
    def fails(*_args, **_kwargs):
        raise torch.OutOfMemoryError("no memory")

    optimizer = torch.optim.SGD(model.parameters())
    engine, expected = tt.TreeEngine(model), plain_gradients(model)
    scored = engine.score(ROWS)
    loss_of(scored).backward()
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr("treetrain.core.engine.score.Scoring.backward", fails)
        scored.backward()
    with pytest.raises(RuntimeError, match=r"have not gone through the tree.*zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    scored = engine.score(ROWS)
    loss_of(scored).backward()
    scored.backward()
    assert_same([p.grad for p in model.parameters()], expected)
    optimizer.step()


def test_two_models_do_not_wait_for_each_other(model):
    other = make_model(seed=3)
    scored = tt.TreeEngine(model).score(ROWS)
    loss_of(scored).backward()
    loss_of_rows(other).backward()
    torch.optim.SGD(other.parameters()).step()
    torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    with pytest.raises(RuntimeError):
        torch.optim.SGD([*other.parameters(), *model.parameters()]).step()


def test_gradients_of_leaves_by_autograd_grad_wait_for_nothing(model):
    scored = tt.TreeEngine(model).score(ROWS)
    torch.autograd.grad(loss_of(scored), scored.logprobs)
    assert all(p.grad is None for p in model.parameters())
    loss = sum(row.sum() for row in tt.logprobs(model, ROWS))
    loss.backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())


def test_a_loss_that_fails_leaves_nothing_behind(model):
    optimizer = torch.optim.SGD(model.parameters())

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("no")

    scored = tt.TreeEngine(model).score(ROWS)
    with pytest.raises(ArithmeticError):
        (scored.logprobs[0].sum() + Fails.apply(scored.logprobs[1]).sum()).backward()
    optimizer.zero_grad()
    optimizer.step()


def test_a_gradient_scaler_and_a_closure_see_gradients_that_have_gone_through_the_tree(model):
    engine, optimizer = tt.TreeEngine(model), torch.optim.LBFGS(model.parameters(), max_iter=2, lr=0.01)

    def closure():
        optimizer.zero_grad()
        scored = engine.score(ROWS)
        loss = -loss_of(scored)
        loss.backward()
        scored.backward()
        return loss

    before = float(closure())
    optimizer.step(closure)
    assert float(closure()) < before
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    sgd.zero_grad()
    scored = engine.score(ROWS)
    scaler.scale(loss_of(scored)).backward()
    with pytest.raises(RuntimeError, match="have not gone through"):
        scaler.step(sgd)
    scored.backward()
    expected = plain_gradients(model)
    scaler.unscale_(sgd)
    assert_same([p.grad for p in model.parameters()], expected)


def test_what_a_score_gave_cannot_be_rearranged(model):
    engine = tt.TreeEngine(model)
    scored = engine.score(ROWS, entropies=True, statistics=True)
    for name in ("logprobs", "entropies", "is_top1", "mean_logits", "log_sum_sq_probs"):
        assert isinstance(getattr(scored, name), tuple), name
    loss_of(scored).backward()
    scored.logprobs = scored.logprobs[::-1]  # what arrived is remembered by leaf
    scored.entropies = None
    scored.backward()
    assert_same([p.grad for p in model.parameters()], plain_gradients(model))


def test_parameters_can_move_as_soon_as_a_score_is_over(model):
    """`Module.to` refuses parameters with weak references where it swaps them, as it does for FSDP2's."""
    gc.collect()
    gc.disable()
    try:
        scored = tt.TreeEngine(model).score(ROWS)
        loss_of(scored).backward()
        scored.backward()
        assert any(weakref.getweakrefs(p) for p in model.parameters())
        del scored
        assert not any(weakref.getweakrefs(p) for p in model.parameters())
    finally:
        gc.enable()


def test_the_error_of_gradients_that_wait_is_the_one_that_was_set_last(model):
    scored = tt.TreeEngine(model).score(ROWS)
    scored.deferral.error = "read them later"
    loss_of(scored).backward()
    with pytest.raises(RuntimeError, match="read them later"):
        next(model.parameters()).grad.norm()


@pytest.mark.parametrize(
    "ask",
    [
        lambda loss, weights: torch.autograd.grad(loss, weights, allow_unused=True),
        lambda loss, weights: torch.autograd.grad(loss, weights[0]),
        lambda loss, weights: loss.backward(inputs=weights),
    ],
    ids=["grad", "one", "inputs"],
)
def test_gradients_of_the_parameters_alone_are_not_none_but_an_error(model, ask):
    scored, weights = tt.TreeEngine(model).score(ROWS, entropies=True), list(model.parameters())
    loss = loss_of(scored) + 0.1 * sum(row.sum() for row in scored.entropies)
    with pytest.raises(RuntimeError, match=r"torch\.autograd\.grad.*tt\.logprobs"):
        ask(loss, weights)
    loss = loss_of(scored) + 0.1 * sum(row.sum() for row in scored.entropies)
    found = torch.autograd.grad(loss, scored.logprobs, retain_graph=True)  # as frameworks do
    assert all(bool((row == torch.arange(1.0, len(row) + 1)).all()) for row in found)
    loss.backward()
    scored.backward()
    assert all(bool(p.grad.any()) for p in weights)


def test_the_gradients_of_scores_can_be_read_where_they_are(model):
    scored = tt.TreeEngine(model).score(ROWS)
    loss_of(scored).backward()
    for row, leaf in zip(scored.logprobs, scored.leaves, strict=True):
        assert torch.equal(row.grad, leaf.grad) and torch.equal(row.grad, torch.arange(1.0, len(row) + 1))


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_hooks_of_parameters_are_called_for_gradients_alone(model, late):
    parameters, seen = list(model.parameters()), []

    def register():
        for p in parameters:
            p.register_hook(lambda grad: seen.append(grad.clone()))
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))

    if not late:
        register()
    scored = tt.TreeEngine(model).score(ROWS)
    if late:
        register()
    (loss_of(scored) + parameters[0].sum()).backward()  # a term that goes past the tree
    assert len(seen) == 2
    scored.backward()
    assert len(seen) == 2 + 2 * len(parameters) and all(x is not None for x in seen)


def test_a_model_that_moves_while_gradients_wait_moves_whole(model):
    scored = tt.TreeEngine(model).score(ROWS)
    loss_of(scored).backward()
    model.to("cpu", torch.float32)  # which changes nothing
    model.to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with pytest.raises(RuntimeError, match="have not gone through the tree"):
        torch.optim.SGD(model.parameters()).step()
    with pytest.raises(RuntimeError, match="weights have changed"):
        scored.backward()
    model.zero_grad()
    scored = tt.TreeEngine(model).score(ROWS)
    loss_of(scored).backward()
    scored.backward()
    assert all(type(p.grad) is torch.Tensor and p.grad.dtype is torch.bfloat16 for p in model.parameters())
