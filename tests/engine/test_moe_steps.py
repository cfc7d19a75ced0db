"""The auxiliary loss of a step and recorded experts, whatever way a step is taken; what cannot be exact is refused."""

import copy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

import treetrain as tt
from support import moe
from support.models import make_model, needs_transformers
from support.plans import planned
from support.shortage import Shortage
from treetrain.check import linear
from treetrain.check.bench import PaddedEngine
from treetrain.check.contract import SFT
from treetrain.check.forests import with_random_facts
from treetrain.check.linear_engine import LinearEngine
from treetrain.core.errors import DataError, UnsupportedModel
from treetrain.layers.experts.routers import check_experts

IDS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 7, 8], [1, 9], [4], [], [9, 8, 7], [9, 8, 7, 7, 2], [1, 2, 3, 4]]
ROWS = with_random_facts(IDS, 3)
ROUTED = moe.at_random(ROWS, 2)
LOSS = SFT.loss


def model_with(family: str = "qwen3_moe", *, auxiliary: bool = True, dtype=torch.float64, **changes):
    return make_model(family, dtype, **(moe.AUXILIARY if auxiliary else {}), **changes)


def reference(model, rows=ROWS, coefficient: float = moe.COEFFICIENT):
    """(loss, gradient) of the rows by the plain model."""
    return moe.expected(model, rows, [SFT], coefficient)[0]


def check(model, found: float, expected, tolerance: float = 1e-6):
    """The library's float32 casts are not lifted here."""
    assert found == pytest.approx(expected[0], rel=tolerance)
    assert linear.relative_error(linear.gradients(model), expected[1]) <= tolerance


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_the_auxiliary_loss_is_the_models_own_function_of_all_rows_at_once(family):
    model = model_with(family, dtype=torch.float32)
    _, logits = moe.score_rows(model, ROWS)
    own = sys.modules[type(model).__module__].load_balancing_loss_func(tuple(logits), logits.shape[-1], moe.TOP_K)
    result = tt.TreeEngine(model).forward_backward(ROWS, LOSS)
    assert result.metrics["router_aux_loss"] == pytest.approx(float(own), rel=1e-6)
    assert float(tt.TreeEngine(model).router_balance(ROWS).loss) == pytest.approx(float(own), rel=1e-6)
    assert result.loss == pytest.approx(result.metrics["nll"] + moe.COEFFICIENT * float(own), rel=1e-6)
    assert result.computed_tokens == result.unique_tokens
    assert tt.TreeEngine(model).plan(ROWS).layout.num_tokens == result.computed_tokens


def test_without_the_flag_nothing_is_added_and_tokens_that_train_nothing_are_left_out():
    model = model_with(auxiliary=False)
    result = tt.TreeEngine(model).forward_backward(ROWS, LOSS)
    assert "router_aux_loss" not in result.metrics and result.computed_tokens < result.unique_tokens
    check(model, result.loss, reference(model, coefficient=0.0))


@pytest.mark.parametrize("engine", [tt.TreeEngine, planned("chunks of 2", "mixed"), LinearEngine])
def test_calls_that_know_the_balance_of_the_whole_step_add_up_to_it(engine):
    model = model_with()
    expected, halves = reference(model), (ROWS[:4], ROWS[4:])
    engine, total = engine(model), 0.0
    balance = engine.router_balance(halves[0]) + engine.router_balance(halves[1])
    model.zero_grad()
    for half in halves:
        total += engine.forward_backward(half, LOSS, LOSS.normaliser(ROWS), balance).loss
    check(model, total, expected)


def test_calls_that_do_not_are_steps_of_their_own():
    model = model_with()
    halves = (ROWS[:4], ROWS[4:])
    parts = [moe.auxiliary_loss(moe.score_rows(model, half)[1]) for half in halves]
    found = [tt.TreeEngine(model).forward_backward(half, LOSS, 10.0).metrics["router_aux_loss"] for half in halves]
    assert found == pytest.approx([float(part) for part in parts], rel=1e-6)


@pytest.mark.parametrize("budget", [None, 4])
@pytest.mark.parametrize("without_gradients", [False, True])
def test_scores_come_with_the_auxiliary_loss(budget, without_gradients):
    model = model_with()
    expected = reference(model)
    model.zero_grad()
    with torch.set_grad_enabled(not without_gradients):
        scored = tt.TreeEngine(model, budget=budget).score(ROWS)
        loss = linear.batch_loss((scored.logprobs, scored.logprobs), ROWS, SFT.per_token)
        loss = loss + moe.COEFFICIENT * scored.aux_loss
    assert float(loss) == pytest.approx(expected[0], rel=1e-6)
    if not without_gradients:
        loss.backward()
        scored.backward()
        check(model, float(loss), expected)


def test_the_auxiliary_loss_alone_can_be_differentiated():
    model = model_with()
    _, logits = moe.score_rows(model, ROWS)
    expected = linear.gradients(model, 3 * moe.auxiliary_loss(logits))
    for budget in (None, 4):
        model.zero_grad()
        scored = tt.TreeEngine(model, budget=budget).score(ROWS)
        (3 * scored.aux_loss).backward()
        scored.backward()
        assert linear.relative_error(linear.gradients(model), expected) <= 1e-6


def test_log_probabilities_that_would_forget_the_auxiliary_loss_are_refused():
    with pytest.raises(UnsupportedModel, match=r"router_aux_loss_coef=0.7.*scored.aux_loss"):
        tt.logprobs(model_with(), [[1, 2, 3]])
    with torch.no_grad():
        assert len(tt.logprobs(model_with(), [[1, 2, 3]])) == 1
    with pytest.raises(ValueError, match="has no experts"):
        tt.TreeEngine(make_model("qwen3")).router_balance([[1, 2, 3]])


@pytest.mark.few(1)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("shape", "keep"), [("1 part", "mixed"), ("chunks of 2", "mixed"), ("chunks of 2", "all")])
def test_activation_checkpointing_changes_nothing(reentrant, shape, keep):
    model = model_with()
    expected = reference(model, ROUTED)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    model.enable_input_require_grads()
    model.zero_grad()
    result = planned(shape, keep)(model).forward_backward(ROUTED, LOSS)
    check(model, result.loss, expected)


def test_checkpointing_of_a_part_of_a_layer_is_refused_where_it_matters_which_tokens_are_run_again():
    model = model_with()
    model.model.layers[0].mlp = CheckpointWrapper(model.model.layers[0].mlp)
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.mlp\..*gate was called outside of a layer that is told"):
        tt.TreeEngine(model).forward_backward(ROUTED, LOSS)
    model.config.output_router_logits = False
    model.zero_grad()
    result = planned("chunks of 2", "all")(model).forward_backward(ROWS, LOSS)
    check(model, result.loss, reference(model, coefficient=0.0))


def test_a_step_that_runs_out_of_memory_starts_over_with_the_choices_of_all_tokens_first():
    model = model_with()
    expected = reference(model)
    model.zero_grad()
    with Shortage(model, graph=9) as shortage, pytest.warns(RuntimeWarning, match="out of memory"):
        result = tt.TreeEngine(model).forward_backward(ROWS, LOSS)
    assert shortage.failures and result.parts > 1
    check(model, result.loss, expected)


def test_a_loss_over_the_whole_batch_in_parts_has_the_auxiliary_loss_too():
    class Spread:
        scope = "batch"

        def normaliser(self, trajectories):
            return 1.0

        def __call__(self, logprobs, entropies, trajectories):
            return torch.stack([row.sum() for row in logprobs if len(row)]).square().sum(), {}

    model, rows = model_with(), [row.replace(loss_weights=None) for row in ROWS]
    (scores, _), logits = moe.score_rows(model, rows)
    loss = Spread()(scores, None, rows)[0] + moe.COEFFICIENT * moe.auxiliary_loss(logits)
    expected = float(loss), linear.gradients(model, loss)
    for shape in ("1 part", "chunks of 2"):
        model.zero_grad()
        check(model, planned(shape, "mixed")(model).forward_backward(rows, Spread()).loss, expected)


def test_every_row_through_a_token_counts():
    model = model_with()
    rows = [tt.Trajectory(ids) for ids in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 7, 8], [1, 2, 3])]
    expected = reference(model, rows)
    model.zero_grad()
    check(model, tt.TreeEngine(model).forward_backward(rows, LOSS).loss, expected)


@pytest.mark.parametrize("kind", ["engine", "parts", "rows", "log-probabilities", "scores"])
def test_recorded_experts_are_taken_by_whatever_way(kind):
    model = model_with(auxiliary=False)
    expected = reference(model, ROUTED, 0.0)
    assert abs(expected[0] - reference(model, coefficient=0.0)[0]) > 1e-3
    model.zero_grad()
    if kind == "log-probabilities":
        logps = tt.logprobs(model, ROUTED, 4)
        loss = linear.batch_loss((logps, logps), ROUTED, SFT.per_token)
        loss.backward()
        return check(model, float(loss), expected)
    if kind == "scores":
        scores = tt.TreeEngine(model).logprobs(ROUTED)
        assert float(linear.batch_loss((scores, scores), ROUTED, SFT.per_token)) == pytest.approx(expected[0])
        return None
    engines = {"engine": tt.TreeEngine, "parts": planned("one segment per part", "all"), "rows": LinearEngine}
    return check(model, engines[kind](model).forward_backward(ROUTED, LOSS).loss, expected)


@pytest.mark.slow
def test_experts_of_all_layers_are_taken_at_those_that_have_some():
    needs_transformers("5.16", "the layer chooses its experts, not the router")
    model = make_model("glm4_moe", torch.float64)  # the first layer has none
    assert len(moe.routers_of(model)) == 1
    rows = moe.at_random(ROWS, 1)
    expected = reference(model, rows, 0.0)
    everywhere = [
        row if row.experts is None else row.replace(experts=np.concatenate([0 * row.experts - 1, row.experts], 1))
        for row in rows
    ]
    model.zero_grad()
    check(model, tt.TreeEngine(model).forward_backward(everywhere, LOSS).loss, expected)


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        (np.zeros((3, 3, 2), int) + np.array([0, 1]), r"2 recorded experts in 3 layers.*2 choose 2"),
        (np.zeros((3, 2, 1), int), r"1 recorded experts in 2 layers"),
        (
            np.zeros((3, 2, 2), int) + np.array([0, 4]),
            r"'a': recorded expert 4 at position 0.*has 4 experts",
        ),
    ],
)
def test_experts_that_the_model_does_not_have_are_refused(experts, says):
    with pytest.raises(DataError, match=says):
        tt.TreeEngine(model_with()).forward_backward([tt.Trajectory([1, 2, 3], experts=experts, id="a")], LOSS)


def test_recorded_experts_on_a_model_without_any_are_refused():
    row = tt.Trajectory([1, 2], experts=np.zeros((2, 2, 1), int))
    with pytest.raises(DataError, match="no router of the model returns the experts"):
        tt.TreeEngine(make_model("qwen3")).forward_backward([row], LOSS)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_every_implementation_of_the_experts_is_exact(implementation):
    model = model_with(dtype=torch.float32)
    model.set_experts_implementation(implementation)
    expected = reference(model, ROUTED)
    model.zero_grad()
    check(model, tt.TreeEngine(model).forward_backward(ROUTED, LOSS).loss, expected, 1e-5)


@pytest.mark.slow
def test_the_models_buffers_and_modules_are_left_as_they_were():
    needs_transformers("5.16", "the layer chooses its experts, not the router")
    model = make_model("deepseek_v3", torch.float64)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert any(name.endswith("e_score_correction_bias") and bool(buffer.any()) for name, buffer in before.items())
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    tt.TreeEngine(model).forward_backward(moe.at_random(ROWS, 1), LOSS)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert hooks == [len(m._forward_pre_hooks) for m in model.modules()]
    assert not any("forward" in vars(m) for m in model.modules())


def test_another_formula_of_the_auxiliary_loss_is_refused_before_any_gradient(monkeypatch):
    model = model_with()
    module = sys.modules[type(model).__module__]
    own = module.load_balancing_loss_func
    monkeypatch.setattr(module, "load_balancing_loss_func", lambda *args, **kwargs: 1.1 * own(*args, **kwargs))
    with pytest.raises(UnsupportedModel, match=r"not supported: set config.output_router_logits=False"):
        tt.TreeEngine(model).forward_backward(ROWS, LOSS)
    assert all(p.grad is None for p in model.parameters())


def test_an_auxiliary_loss_that_nothing_trainable_lies_below_needs_no_gradient():
    model = model_with()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    assert "router_aux_loss" in tt.TreeEngine(model).forward_backward(ROWS, LOSS).metrics


def test_routers_that_something_goes_past_are_refused_where_they_are_needed():
    model = model_with()
    block = model.model.layers[0].mlp
    block.forward = lambda hidden: hidden  # as a fused kernel would
    with pytest.raises(UnsupportedModel, match="1 of 2 routers were called"):
        tt.TreeEngine(model).forward_backward(ROWS, LOSS)


def test_a_router_that_does_not_choose_by_topk_cannot_take_recorded_experts():
    model = model_with(auxiliary=False)
    router = model.model.layers[1].mlp.gate

    def sorts(hidden):
        logits = torch.nn.functional.linear(hidden, router.weight)
        weights, chosen = logits.softmax(-1).sort(-1, descending=True)
        return logits, weights[:, :2], chosen[:, :2]

    router.forward = sorts
    with pytest.raises(UnsupportedModel, match=r"layers.1.mlp.gate .* makes 0 choices of 2 out of 4"):
        tt.TreeEngine(model).forward_backward(ROUTED, LOSS)


def test_a_router_of_another_form_has_no_auxiliary_loss_here():
    model = model_with()
    router = model.model.layers[1].mlp.gate
    plain = router.forward
    router.forward = lambda hidden: (lambda a, b, c: (a[None], b, c))(*plain(hidden))
    with pytest.raises(UnsupportedModel, match=r"returns .* were expected"):
        tt.TreeEngine(model).forward_backward(ROWS, LOSS)


def test_a_coefficient_under_another_name_is_found_or_refused():
    model = model_with()
    model.aux_loss_coef = model.__dict__.pop("router_aux_loss_coef")
    assert tt.TreeEngine(model).capabilities.auxiliary == moe.COEFFICIENT
    del model.aux_loss_coef
    config = SimpleNamespace(output_router_logits=True, num_hidden_layers=2)
    with pytest.raises(UnsupportedModel, match=r"output_router_logits=True.*under a name"):
        check_experts(model, config)


def test_padded_batches_would_count_their_padding():
    with pytest.raises(UnsupportedModel, match="count the padding"):
        PaddedEngine(model_with(dtype=torch.float32)).forward_backward(ROWS, LOSS)


def test_a_frozen_router_still_sends_the_auxiliary_loss_to_the_layers_below():
    model = model_with()
    for router in moe.routers_of(model):
        router.requires_grad_(False)
    expected = reference(model)
    for shape in ("1 part", "chunks of 2"):
        model.zero_grad()
        check(model, planned(shape, "mixed")(model).forward_backward(ROWS, LOSS).loss, expected)


ADAPTERS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "expert weights": {
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
    "router weights": {"target_modules": ["q_proj"], "target_parameters": ["gate.weight"]},
    "a router of its own": {"target_modules": ["q_proj"], "modules_to_save": ["gate"]},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("shape", ["1 part", "chunks of 2"])
def test_adapters_on_a_mixture_of_experts_are_exact(kind, shape):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_dropout=0.0, init_lora_weights=False, **ADAPTERS[kind])
    model = peft.get_peft_model(copy.deepcopy(model_with()), config).double()
    assert any("lora" in name for name, p in model.named_parameters() if p.requires_grad)
    expected = reference(model, ROUTED)
    model.zero_grad()
    check(model, planned(shape, "mixed")(model).forward_backward(ROUTED, LOSS).loss, expected)


def test_recorded_experts_of_layers_that_choose_twice_are_refused():
    shape = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "kv_channels": 8}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = transformers.JetMoeForCausalLM(transformers.JetMoeConfig(**shape, **experts)).eval()
    rows = [tt.Trajectory([1, 2, 3], experts=np.tile([0, 1], (3, 4, 1)))]
    with pytest.raises(DataError, match="chooses experts more than once in a layer"):
        tt.TreeEngine(model).forward_backward(rows, tt.losses.sft())
    tt.TreeEngine(model).forward_backward([rows[0].replace(experts=None)], tt.losses.sft())
