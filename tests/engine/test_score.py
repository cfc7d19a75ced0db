"""`TreeEngine.score` hands out leaves; what arrives in them goes through the tree once, in every plan."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import treetrain as tt
from support import moe
from support.models import make_model
from support.passes import unique_ids
from support.plans import calls_answer, keeping_graphs, planned
from support.scored_rows import ROWS, SHAPES, WAYS, every_plan, every_way
from treetrain.check import linear
from treetrain.check.contract import PureFloat64
from treetrain.check.forests import VOCAB, forests, with_random_facts
from treetrain.core.engine.engine_model import Call, EngineModel
from treetrain.core.engine.executor import Executor
from treetrain.core.planning.cost import CostModel, PartBytes
from treetrain.core.planning.plan import Bytes
from treetrain.models.meters import CountStorages


@pytest.fixture(autouse=True)
def pure_float64():
    """Norms of transformers that compute in float32 do not."""
    with PureFloat64():
        yield


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3", dtype=torch.float64)


def engine_with(model, shape, keep, graphs, **options):
    """An engine whose plans have one shape, and whose graphs are kept or not."""

    engine = planned(shape, keep)(model, **options)
    calls_answer(engine, plan_keeping_graphs=keeping_graphs(graphs))
    return engine


def some_loss(logprobs, entropies):
    """Not linear, other weights for every row and token, and nothing of the third row."""
    total = torch.zeros((), dtype=torch.float64)
    for number, (row, entropy) in enumerate(zip(logprobs, entropies)):
        if number != 2 and len(row):
            weights = torch.linspace(0.3, 1.7, len(row), dtype=row.dtype) * (number + 1)
            total = total + (weights * (row.exp() + 0.2 * row.square() + 0.5 * entropy)).sum() + row.sum() ** 2 / 9
    return total


def linear_gradients(model, rows, temperature=1.0):
    scores = linear.score_rows(model, rows, temperature)
    loss = some_loss(*scores)
    return loss.detach(), linear.gradients(model, loss), scores


@pytest.mark.few(1)
@every_way
@every_plan
def test_a_loss_of_ones_own_has_the_gradients_of_rows_alone(model, shape, keep, graphs):
    loss, truth, scores = linear_gradients(model, ROWS, 1.3)
    engine = engine_with(model, shape, keep, graphs, temperature=1.3)
    model.zero_grad()
    for times in (1, 2):  # gradients add up
        scored = engine.score(ROWS, entropies=True)
        for own, expected in zip(scored.logprobs, scores[0], strict=True):
            assert own.requires_grad and torch.allclose(own, expected, atol=1e-12)
        found = some_loss(scored.logprobs, scored.entropies)
        found.backward()
        scored.backward()
        assert abs(found.item() - loss.item()) <= 1e-12 * abs(loss.item())
        assert linear.relative_error(linear.gradients(model), times * truth) <= 1e-12
    assert scored.plan.scores_first == graphs.replace("partly", "kept") and scored.parts == scored.plan.num_parts
    assert (scored.recomputed_tokens == 0) == (graphs == "kept")
    assert graphs == "recomputed" or scored.recomputed_tokens == scored.plan.sizes[~scored.plan.kept].sum()


@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logits_are_computed_again_where_there_is_no_room_for_them(model, monkeypatch, temperature):
    _, truth, _ = linear_gradients(model, ROWS, temperature)
    for room in (True, False):
        monkeypatch.setattr(Call, "keeps_logits", lambda self, plan, room=room: room)
        for entropies in (True, False):
            model.zero_grad()
            scored = tt.TreeEngine(model, temperature=temperature).score(ROWS, entropies=entropies, statistics=True)
            if entropies:
                some_loss(scored.logprobs, scored.entropies).backward()
                scored.backward()
                assert linear.relative_error(linear.gradients(model), truth) <= 1e-12
            else:
                sum(row.square().sum() for row in scored.logprobs).backward()
                scored.backward()
                again = linear.score_rows(model, ROWS, temperature)[0]
                expected = linear.gradients(model, sum(row.square().sum() for row in again))
                assert linear.relative_error(linear.gradients(model), expected) <= 1e-12


@settings(max_examples=8, deadline=None)
@given(forests(), st.sampled_from(SHAPES), st.sampled_from(["kept", "recomputed"]), st.integers(0, 99))
def test_random_forests(rows, plan, graphs, seed):
    model = make_model("llama", dtype=torch.float64, seed=seed % 3)
    if not any(len(row) > 1 for number, row in enumerate(rows) if number != 2):
        rows = [[1, 2], *rows]
    _, truth, _ = linear_gradients(model, rows)
    scored = engine_with(model, *plan, graphs).score(rows, entropies=True)
    some_loss(scored.logprobs, scored.entropies).backward()
    scored.backward()
    assert linear.relative_error(linear.gradients(model), truth) <= 1e-12


@pytest.mark.few(1)
@every_way
def test_a_mask_says_what_is_computed(model, graphs):
    rng = np.random.default_rng(1)
    mask = [rng.random(max(len(row) - 1, 0)) < 0.4 for row in ROWS]
    logprobs, _ = linear.score_rows(model, ROWS)
    wanted = [torch.from_numpy(m) for m in mask]
    truth_scores = [torch.where(m, x, 0.0) for m, x in zip(wanted, logprobs)]
    truth = linear.gradients(model, sum(row.square().sum() for row in truth_scores))
    for given_mask in (mask, [m * 0.5 for m in mask], [m.tolist() for m in mask]):
        model.zero_grad()
        scored = engine_with(model, "N/4", "mixed", graphs).score(ROWS, entropies=True, mask=given_mask)
        for own, expected in zip(scored.logprobs, truth_scores, strict=True):
            assert torch.allclose(own, expected, atol=1e-12)
        # What is not wanted gets no gradient, whatever the loss says.
        sum((row - 1e3 * (row == 0)).square().sum() for row in scored.logprobs).backward()
        scored.backward()
        assert linear.relative_error(linear.gradients(model), truth) <= 1e-12
    assert scored.computed_tokens < scored.unique_tokens
    live = tt.logprobs(model, ROWS, mask=mask)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(live, truth_scores))
    model.zero_grad()
    sum(row.square().sum() for row in live).backward()
    assert linear.relative_error(linear.gradients(model), truth) <= 1e-12
    assert all(
        torch.allclose(a, b, atol=1e-12) for a, b in zip(tt.TreeEngine(model).logprobs(ROWS, mask=mask), truth_scores)
    )


def test_a_mask_of_another_shape_is_refused(model):
    engine = tt.TreeEngine(model)
    with pytest.raises(tt.DataError, match=r"mask has 1 rows, the batch 2"):
        engine.score([[1, 2], [1, 3]], mask=[[1]])
    with pytest.raises(tt.DataError, match=r"trajectory number 1 .* has 2 tokens, its mask the shape \(2,\); give 1"):
        engine.score([[1, 2], [1, 3]], mask=[[1], [1, 1]])


def test_forward_backward_computes_what_a_mask_wants(model):
    rows = with_random_facts([row for row in ROWS if len(row) > 1], 3)
    mask = [np.arange(len(row) - 1) % 2 for row in rows]

    class Sum:
        def __call__(self, logprobs, entropies, row):
            return logprobs.square().sum(), {}

        def normaliser(self, rows):
            return 1.0

    logprobs, _ = linear.score_rows(model, [row.ids.tolist() for row in rows])
    truth = linear.gradients(model, sum((torch.from_numpy(m) * x).square().sum() for m, x in zip(mask, logprobs)))
    model.zero_grad()
    result = tt.TreeEngine(model).forward_backward(rows, Sum(), mask=mask)
    assert linear.relative_error(linear.gradients(model), truth) <= 1e-12
    assert result.computed_tokens < result.unique_tokens


@every_way
def test_statistics_are_those_of_the_logits(model, graphs):
    scored = engine_with(model, "chunks of 2", "all", graphs, temperature=0.7).score(ROWS, statistics=True)
    for number, row in enumerate(ROWS):
        if len(row) < 2:
            continue
        ids = torch.tensor([row])
        logits = model(input_ids=ids).logits[0, :-1] / 0.7
        assert torch.equal(scored.is_top1[number], logits.argmax(-1) == ids[0, 1:])
        assert torch.allclose(scored.mean_logits[number], logits.mean(-1))
        assert torch.allclose(scored.log_sum_sq_probs[number], logits.softmax(-1).square().sum(-1).log())
    assert not scored.mean_logits[0].requires_grad


def test_a_head_with_an_adapter_gives_the_same_statistics(model):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(model), config).eval()
    _, truth, _ = linear_gradients(adapted, ROWS)
    scored = tt.TreeEngine(adapted).score(ROWS, entropies=True, statistics=True)
    ids = torch.tensor([ROWS[0]])
    logits = adapted(input_ids=ids).logits[0, :-1]
    assert torch.allclose(scored.mean_logits[0], logits.mean(-1))
    assert torch.equal(scored.is_top1[0], logits.argmax(-1) == ids[0, 1:])
    assert torch.allclose(scored.log_sum_sq_probs[0], logits.softmax(-1).square().sum(-1).log())
    some_loss(scored.logprobs, scored.entropies).backward()
    scored.backward()
    assert linear.relative_error(linear.gradients(adapted), truth) <= 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("graphs", WAYS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_run_again_in_the_tree(graphs, reentrant):
    model = make_model("qwen3", dtype=torch.float64).train()
    _, truth, _ = linear_gradients(model, ROWS)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    scored = engine_with(model, "N/4", "mixed", graphs).score(ROWS, entropies=True)
    some_loss(scored.logprobs, scored.entropies).backward()
    scored.backward()
    assert linear.relative_error(linear.gradients(model), truth) <= 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen3_5_text", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("graphs", WAYS)
def test_states_windows_and_sinks_are_handed_on(family, graphs):
    model = make_model(family).double()
    _, truth, _ = linear_gradients(model, ROWS)
    scored = engine_with(model, "chunks of 2", "all", graphs).score(ROWS, entropies=True)
    some_loss(scored.logprobs, scored.entropies).backward()
    scored.backward()
    assert linear.relative_error(linear.gradients(model), truth) <= 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", SHAPES)
@pytest.mark.parametrize("graphs", WAYS)
def test_the_routers_auxiliary_loss_is_a_leaf(plan, graphs):
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = make_model("qwen3_moe", dtype=torch.float64, **changes)
    rows = [row for row in ROWS if len(row) > 1]

    def whole(logprobs, aux):
        return sum(row.square().sum() for row in logprobs) + aux**2

    (logprobs, _), logits = moe.score_rows(model, [tt.Trajectory(row) for row in rows])
    aux = moe.auxiliary_loss(logits)
    truth = linear.gradients(model, whole(logprobs, aux))
    scored = engine_with(model, *plan, graphs).score(rows)
    assert torch.allclose(scored.aux_loss, aux, atol=1e-12)
    whole(scored.logprobs, scored.aux_loss).backward()
    scored.backward()
    assert linear.relative_error(linear.gradients(model), truth) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("graphs", WAYS)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_checkpointed_experts_see_their_own_routing_again(graphs, reentrant, recorded):
    model = make_model("qwen3_moe", dtype=torch.float64, output_router_logits=not recorded, router_aux_loss_coef=0.5)
    rows = [tt.Trajectory(row) for row in ROWS if len(row) > 1]
    if recorded:
        rng = np.random.default_rng(0)
        experts = [np.array([[rng.permutation(4)[:2]] * 2 for _ in range(len(row))]) for row in rows]
        rows = [row.replace(experts=chosen) for row, chosen in zip(rows, experts)]

    def gradients():
        model.zero_grad()
        scored = engine_with(model, "N/4", "mixed", graphs).score(rows)
        total = sum(row.square().sum() for row in scored.logprobs)
        (total if scored.aux_loss is None else total + scored.aux_loss**2).backward()
        scored.backward()
        return linear.gradients(model)

    truth = gradients()
    if not recorded:
        (logprobs, _), logits = moe.score_rows(model, rows)
        total = sum(row.square().sum() for row in logprobs) + moe.auxiliary_loss(logits) ** 2
        truth = linear.gradients(model, total)
    model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert linear.relative_error(gradients(), truth) <= 1e-12


@every_way
def test_values_of_a_head_are_leaves(model, graphs):
    head = nn.Linear(model.config.hidden_size, 1).double()
    head.forward = lambda x: nn.functional.linear(x, head.weight, head.bias).squeeze(-1)
    live, values = tt.logprobs(model, ROWS, return_values=True, value_head=head)
    both = [*model.parameters(), *head.parameters()]

    def whole(logprobs, values):
        return sum((a * b).sum() for a, b in zip(logprobs, values))

    truth = torch.cat([g.flatten() for g in torch.autograd.grad(whole(live, values), both)])
    model.zero_grad()
    scored = engine_with(model, "N/4", "mixed", graphs, value_head=head).score(ROWS, values=True)
    whole(scored.logprobs, scored.values).backward()
    scored.backward()
    found = torch.cat([p.grad.flatten() for p in both])
    assert linear.relative_error(found, truth) <= 1e-12


@pytest.mark.few(1)
@every_way
def test_rewards_are_one_leaf(graphs):
    from transformers import Qwen3ForSequenceClassification

    config = make_model("qwen3").config
    config.num_labels, config.pad_token_id = 1, 36
    torch.manual_seed(0)
    model = Qwen3ForSequenceClassification(config).double().eval()
    rows = [row for row in ROWS if row]
    alone = torch.stack([model(input_ids=torch.tensor([row])).logits[0] for row in rows])
    truth = linear.gradients(model, alone.square().sum())
    scored = engine_with(model, "one segment per part", "mixed", graphs).score(rows, rewards=True)
    assert torch.allclose(scored.rewards.view(-1), alone.view(-1), atol=1e-12) and scored.logprobs == ()
    scored.rewards.square().sum().backward()
    scored.backward()
    assert linear.relative_error(linear.gradients(model), truth) <= 1e-12


def test_graphs_are_kept_where_they_fit_into_the_budget(model, monkeypatch):
    rows = unique_ids(ROWS[:6])
    tokens = tt.build_tree(rows).num_tokens

    def scored_within(budget):
        engine = tt.TreeEngine(model, budget=budget)
        scored = engine.score(rows)
        sum(row.sum() for row in scored.logprobs).backward()
        scored.backward()
        return scored.plan

    for budget in (tokens, None, "1GiB"):
        assert scored_within(budget).scores_first == "kept" and scored_within(budget).kept.all()
    half = scored_within(tokens // 2)
    assert half.scores_first == "kept" and half.kept.any() and not half.kept.all()
    assert half.peak_tokens <= tokens // 2
    again = half.sizes[~half.kept].sum()
    assert f"the others ({again:,} tokens) run forward again, last first: " in half.explain()
    assert scored_within(1).scores_first == "recomputed"  # the caches of all parts would take too much
    # Without a budget parts may be made for speed alone: then all of them are kept.
    monkeypatch.setattr("treetrain.core.planning.make.PART_TOKENS", {"cpu": 8})
    engine = tt.TreeEngine(model)
    scored = engine.score(rows)
    assert scored.parts > 1 and scored.plan.scores_first == "kept"
    engine = tt.TreeEngine(model, budget="1GiB")
    kept = scored.plan
    monkeypatch.setattr(CostModel, "peak_bytes", lambda self, plan: (1 + (plan.scores_first == "kept")) * 1e8)
    assert engine.prepared.call().plan_keeping_graphs(kept).kept.all()
    monkeypatch.setattr(CostModel, "graphs_within", lambda self, plan, limit: PartBytes(np.ones(1), np.full(1, -1.0)))
    assert tt.TreeEngine(model, budget="150MB").prepared.call().plan_keeping_graphs(kept) is None
    monkeypatch.setattr(EngineModel, "free_bytes", lambda self: 150e6)
    assert tt.TreeEngine(model).prepared.call().plan_keeping_graphs(kept) is None
    assert "again with graph when the loss is known" in tt.TreeEngine(model, budget=1).score(rows).plan.explain()
    assert "graphs are kept until the loss is known" in scored.plan.explain()


def test_memory_that_runs_out_costs_time_and_nothing_else(model, monkeypatch):
    _, truth, _ = linear_gradients(model, ROWS)
    forward_all, backward_all, failed = Executor.forward_all, Executor.backward_all, []

    def fails_once(phase, run):
        def wrapped(self, *args, **options):
            if phase not in failed:
                failed.append(phase)
                self._runner.counts.backward_begun = phase == "backward"
                raise torch.OutOfMemoryError("CUDA out of memory")
            return run(self, *args, **options)

        return wrapped

    for phase in ("forward", "backward"):
        failed.clear()
        monkeypatch.setattr(
            Executor, "forward_all", fails_once("forward", forward_all) if phase == "forward" else forward_all
        )
        monkeypatch.setattr(Executor, "backward_all", fails_once("backward", backward_all))
        failed += ["backward"] if phase == "forward" else ["forward"]
        model.zero_grad()
        with pytest.warns(RuntimeWarning, match="out of memory"):
            scored = tt.TreeEngine(model).score(ROWS, entropies=True)
            some_loss(scored.logprobs, scored.entropies).backward()
            scored.backward()
        assert scored.plan.scores_first == "recomputed"
        assert linear.relative_error(linear.gradients(model), truth) <= 1e-12
    # Gradients of an earlier call cannot be put back.
    failed[:] = ["forward"]
    scored = tt.TreeEngine(model).score(ROWS)
    sum(row.sum() for row in scored.logprobs).backward()
    with pytest.raises(RuntimeError, match=r"gradients of earlier calls lay in .grad, so the step cannot start over"):
        scored.backward()


def test_a_backward_that_would_be_wrong_is_an_error(model):
    engine = tt.TreeEngine(model)
    scored = engine.score(ROWS)
    with pytest.raises(RuntimeError, match="no gradient has arrived"):
        scored.backward()
    sum(row.sum() for row in scored.logprobs).backward()
    scored.backward()
    with pytest.raises(RuntimeError, match=r"a second backward through TreeEngine.score"):
        scored.backward()
    scored = engine.score(ROWS)
    sum(row.sum() for row in scored.logprobs).backward()
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match=r"weights have changed between TreeEngine.score and its backward"):
        scored.backward()
    with torch.no_grad():
        model.model.norm.weight.div_(1.5)
    with torch.no_grad():
        scored = engine.score(ROWS)
    assert not scored.logprobs[0].requires_grad
    with pytest.raises(RuntimeError, match=r"ran under torch.no_grad"):
        scored.backward()
    scored = engine.score(ROWS)
    model.model.norm.weight.requires_grad_(False)
    sum(row.sum() for row in scored.logprobs).backward()
    with pytest.raises(RuntimeError, match=r"requires_grad of model.norm.weight was True and is False"):
        scored.backward()
    model.model.norm.weight.requires_grad_(True)


def test_a_loss_that_compares_rows_runs_nothing_twice_where_all_graphs_fit(model, monkeypatch):
    pairs = [(0, True), (0, False), (1, True), (1, False)]
    rows = [
        tt.Trajectory(ids, pair=pair, chosen=chosen, ref_logprobs=np.full(len(ids), -3.0))
        for ids, (pair, chosen) in zip(ROWS, pairs)
    ]
    loss = tt.losses.dpo()
    engines = {graphs: planned("chunks of 2", "none")(model) for graphs in ("whole", "kept", "partly", "recomputed")}
    engines["whole"] = tt.TreeEngine(model)
    found = {}
    for graphs, engine in engines.items():
        calls_answer(engine, plan_keeping_graphs=keeping_graphs(graphs.replace("whole", "kept")))
        model.zero_grad()
        result = engine.forward_backward(rows, loss)
        found[graphs] = linear.gradients(model)
        assert (result.recomputed_tokens > 0) == (graphs in ("partly", "recomputed"))
    for graphs in ("kept", "partly", "recomputed"):
        assert linear.relative_error(found[graphs], found["whole"]) <= 1e-12


def test_hooks_of_parameters_see_one_gradient(model):
    model.zero_grad()
    seen = []
    weight = model.model.layers[0].mlp.up_proj.weight
    handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    scored = engine_with(model, "chunks of 2", "all", "kept").score(ROWS)
    sum(row.sum() for row in scored.logprobs).backward()
    scored.backward()
    handle.remove()
    assert len(seen) == 1 and torch.equal(seen[0], weight.grad)


def test_a_forward_within_an_autocast_that_accelerate_wrapped_leaves_autocast_as_it_was():
    model = make_model("qwen3")
    # As Accelerate's prepare_model does it: one autocast object for all calls of the forward.
    model._original_forward = inner = model.forward
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    model.forward = autocast(inner)

    @autocast
    def stand_in():
        return tt.TreeEngine(model, check=False).score(ROWS)

    scored = stand_in()
    assert not torch.is_autocast_enabled("cpu")
    assert scored.logprobs[0].dtype == torch.float32
    sum(row.sum() for row in scored.logprobs).backward()
    scored.backward()
    assert not torch.is_autocast_enabled("cpu")


def test_a_batch_without_predictions_is_no_error(model):
    for rows in ([], [[1], []]):
        scored = tt.TreeEngine(model).score(rows, entropies=True, statistics=True)
        assert [len(row) for row in scored.logprobs] == [0] * len(rows)
        scored.backward()


def test_the_vocabulary_of_the_tests_is_that_of_the_model(model):
    assert max(max(row, default=0) for row in ROWS) < VOCAB <= model.config.vocab_size


@pytest.mark.slow
def test_a_budget_in_bytes_is_held_while_more_graphs_are_kept_as_it_grows():
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "max_position_embeddings": 2048}
    model = make_model("qwen3", dtype=torch.float64, **shape)
    stem = torch.randint(VOCAB, (200,)).tolist()
    rows = [[*stem[: 50 * (k % 4)], *torch.randint(VOCAB, (125,)).tolist()] for k in range(12)]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    engine = tt.TreeEngine(model)
    whole = engine.cost.peak_bytes(engine.plan(rows).keeping_graphs())
    again = []
    for share in (0.4, 0.6, 0.8, 1.01):
        budget = Bytes(int(share * whole))
        with CountStorages() as meter:
            scored = tt.TreeEngine(model, budget=budget).score(rows)
            sum(row.square().sum() for row in scored.logprobs).backward()
            scored.backward()
        assert meter.peak <= budget.count, (share, meter.peak, budget)
        assert scored.plan.scores_first == "kept"
        again.append(scored.recomputed_tokens)
    assert again == sorted(again, reverse=True) and again[0] > again[1] > again[-1] == 0
