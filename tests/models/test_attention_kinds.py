"""Windows, chunks, sinks, soft-caps, unequal head sizes and scaled heads: the numerics contract on real classes."""

import contextlib
import copy

import numpy as np
import pytest
import torch
import transformers

import treetrain as tt
from support.models import BASE, build, make_model
from support.plans import planned
from treetrain.check import linear
from treetrain.check.contract import PPO, SFT, PureFloat64, as_dtype, check_contract
from treetrain.core.errors import DataError, UnsupportedModel
from treetrain.models.loading import check_config, load_model

FAMILIES = ["llama4_tuned", "gemma2", "gemma3_text", "mistral_window", "qwen2_window", "cohere2", "granite", "cohere"]
if hasattr(transformers, "GraniteSWAConfig"):
    FAMILIES += ["granite_swa"]
FAMILIES += ["gpt_oss", "deepseek_v3", "llama4_text"]
ROUTED = ("gpt_oss", "deepseek_v3", "llama4_text", "llama4_tuned")
"""Routers choose other experts in bfloat16 (tests of experts replay the choice): held in float64 here."""
SHAPES = [("1 part", "none"), ("chunks of 7", "all"), ("chunks of 7", "none"), ("chunks of 2", "mixed")]
SHAPES += [("one segment per part", "mixed"), ("one segment per part", "none")]
TRUNK = np.random.default_rng(3).integers(0, 37, 30).tolist()
ROWS = [  # forks nearer and farther than the windows of 5, prefixes, a duplicate, one row by itself
    TRUNK,
    [*TRUNK[:19], 1, 2, 3, 4, 5, 6, 7, 8, 9],
    [*TRUNK[:19], 1, 2, 9],
    [*TRUNK[:21], 4],
    [*TRUNK[:3], 30, 31, 32],
    TRUNK[:12],
    [20, 21, 22, 23],
    [*TRUNK[:3], 30, 31, 32],
]


def trajectories() -> list[tt.Trajectory]:
    return [tt.Trajectory(row) for row in ROWS]


def gradients(model, rows=ROWS) -> torch.Tensor:
    """Gradients of the rows by themselves."""
    scores, _ = linear.score_rows(model, rows)
    return linear.gradients(model, -torch.cat(scores).mean())


def error(model, engine, expected: torch.Tensor, rows=ROWS) -> float:
    model.zero_grad()
    engine(model).forward_backward([tt.Trajectory(row) for row in rows], tt.losses.sft())
    return linear.relative_error(linear.gradients(model), expected)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("family", "shapes"),
    [
        *((family, SHAPES[number % 6 :: 6]) for number, family in enumerate(FAMILIES)),
        *(pytest.param(family, SHAPES, marks=pytest.mark.slow) for family in FAMILIES),
    ],
)
def test_every_plan_of_a_forest_is_exact_in_float64(family, shapes):
    model = make_model(family, dtype=torch.float64)
    with PureFloat64():
        expected = gradients(model)
        for shape, keep in shapes:
            assert error(model, planned(shape, keep), expected) <= 1e-12, (shape, keep)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("shared", "kinds", "shapes"),
    [
        (2, ["sliding_attention", "full_attention"] * 2, SHAPES[::2]),
        (3, ["full_attention"] * 4, SHAPES[1::2]),
    ],
)
def test_layers_that_share_the_keys_and_values_of_others_are_exact_in_every_plan(shared, kinds, shapes):
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this transformers has no Gemma 4")
    per_layer = {"vocab_size_per_layer_input": BASE["vocab_size"], "hidden_size_per_layer_input": 8}
    sizes = {"num_hidden_layers": 4, "head_dim": 8, "global_head_dim": 8, "sliding_window": 5}
    config = transformers.Gemma4TextConfig(**(BASE | sizes | per_layer), num_kv_shared_layers=shared, layer_types=kinds)
    model = build(transformers.Gemma4ForCausalLM, config, dtype=torch.float64)
    with PureFloat64():
        expected = gradients(model)
        for shape, keep in shapes:
            assert error(model, planned(shape, keep), expected) <= 1e-12, (shape, keep)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["1 part", "chunks of 7", "chunks of 2", "one segment per part"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ROUTED])
def test_random_forests_hold_the_numerics_contract(family, shape, record_property):
    keeps = ("none",) if shape == "1 part" else ("none", "all", "mixed")
    engines = [planned(shape, keep) for keep in keeps]
    record_property("errors", check_contract(make_model(family), [SFT, PPO], 8, engines=engines))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "mistral_window"])
def test_random_forests_hold_the_numerics_contract_in_small_parts(family, record_property):
    engines = [planned("1 part", "none"), planned("chunks of 7", "mixed")]
    record_property("errors", check_contract(make_model(family), [PPO], 2, engines=engines))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "window"),
    [
        *(("gemma3_text", window) for window in (1, 16)),
        *(("llama4_text", window) for window in (2, 1000)),
        *(pytest.param("gemma3_text", window, marks=pytest.mark.slow) for window in (2, 4, 1000)),
        *(pytest.param("llama4_text", window, marks=pytest.mark.slow) for window in (1, 4, 16)),
    ],
)
def test_windows_and_chunks_of_every_size_are_exact(family, window):
    field = {"gemma3_text": "sliding_window", "llama4_text": "attention_chunk_size"}[family]
    model = make_model(family, dtype=torch.float64, **{field: window})
    with PureFloat64():
        expected = gradients(model)
        for shape, keep in (("1 part", "none"), ("chunks of 7", "mixed"), ("one segment per part", "all")):
            assert error(model, planned(shape, keep), expected) <= 1e-12, shape


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama4_tuned"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_runs_layers_again_with_their_own_kind(family, reentrant):
    model = make_model(family, dtype=torch.float64)
    with PureFloat64():
        expected = gradients(model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        for shape, keep in (("1 part", "none"), ("chunks of 7", "mixed")):
            assert error(model, planned(shape, keep), expected) <= 1e-12


@pytest.mark.slow
def test_the_gradient_of_sinks_reaches_the_parameter():
    model = make_model("gpt_oss", dtype=torch.float64)
    sinks = [p for name, p in model.named_parameters() if name.endswith("sinks")]
    gradients_of = []
    for parameter in sinks:
        with torch.no_grad():
            parameter.add_(torch.linspace(-1, 2, len(parameter)))
    with PureFloat64():
        scores, _ = linear.score_rows(model, ROWS)
        expected = torch.autograd.grad(-torch.cat(scores).mean(), sinks)
        for shape, keep in SHAPES[1::2]:
            model.zero_grad()
            planned(shape, keep)(model).forward_backward(trajectories(), tt.losses.sft())
            gradients_of = [p.grad for p in sinks]
            assert all(float(g.norm()) > 1e-6 for g in expected)
            assert max(linear.relative_error(a, b) for a, b in zip(gradients_of, expected)) <= 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite"])
def test_log_probabilities_and_entropies_are_those_of_the_models_own_logits(family):
    model = make_model(family)
    for adapted, temperature in ((model, 0.7), (with_lora_on_the_head(model), 1.0)):
        expected = linear.score_rows(adapted, ROWS, temperature)
        got = tt.logprobs(adapted, ROWS, temperature=temperature, return_entropy=True)
        for ours, theirs in zip(got, expected):
            torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), rtol=1e-5, atol=2e-6)


def with_lora_on_the_head(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    return get_peft_model(copy.deepcopy(model), config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "loss"),
    [
        *(("gemma2", tt.losses.reinforce(entropy=0.1)), ("cohere", tt.losses.sft())),
        ("gemma2", tt.losses.sft()),
        ("cohere", tt.losses.reinforce(entropy=0.1)),
    ],
)
def test_a_scaled_head_with_a_bias_has_exact_gradients(family, loss):
    # Untied, so that the head's own gradient is seen, with a bias of its own.
    model = make_model(family, dtype=torch.float64, tie_word_embeddings=False)
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-2, 2, 37, dtype=torch.float64))
    rows = [tt.Trajectory(row, advantages=1.0) for row in ROWS]
    with PureFloat64():
        (logps, entropies), entropy = linear.score_rows(model, ROWS), 0.1 if "entropies" in loss.needs else 0.0
        expected = linear.gradients(model, -torch.cat(logps).mean() - entropy * torch.cat(entropies).mean())
        for engine in (planned("1 part", "none"), planned("chunks of 7", "mixed")):
            model.zero_grad()
            engine(model).forward_backward(rows, loss)
            assert linear.relative_error(linear.gradients(model), expected) <= 1e-12


@pytest.mark.slow
def test_bfloat16_heads_are_capped_in_float32():
    low = make_model("gemma2", dtype=torch.bfloat16, final_logit_softcapping=0.5)
    truth = torch.cat(linear.score_rows(as_dtype(low, torch.float64), ROWS)[0])
    ours, theirs = torch.cat(tt.logprobs(low, ROWS)), torch.cat(linear.score_rows(low, ROWS)[0])
    assert ours.dtype == torch.float32
    assert linear.relative_error(ours, truth) <= 1.5 * linear.relative_error(theirs, truth)


LONGROPE = {
    "rope_type": "longrope",
    "factor": 2.0,
    "rope_theta": 1e4,
    "short_factor": [1.0] * 3,
    "long_factor": [2.0] * 3,
    "original_max_position_embeddings": 30,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(("scaling", "longest"), [(LONGROPE, 30), (DYNAMIC, 40)])
def test_rotary_frequencies_that_follow_the_length_are_exact_up_to_where_they_change(scaling, longest):
    config = transformers.LlamaConfig(**(BASE | {"rope_parameters": dict(scaling), "max_position_embeddings": 40}))
    model = build(transformers.LlamaForCausalLM, config, dtype=torch.float64)
    other = [i % 37 for i in range(longest)]
    rows = [TRUNK, [*TRUNK[:9], 1, 2], other, other[:7]]
    with PureFloat64():
        expected = gradients(model, rows)
        for engine in (planned("1 part", "none"), planned("chunks of 7", "mixed")):
            assert error(model, engine, expected, rows) <= 1e-12
    with pytest.raises(DataError, match=rf"number 1 \(from 0\) has {longest + 1} tokens"):
        tt.logprobs(model, [[1, 2], [7] * (longest + 1)])


def test_rotary_frequencies_that_an_earlier_call_has_stretched_are_refused():
    config = transformers.LlamaConfig(**(BASE | {"rope_parameters": DYNAMIC, "max_position_embeddings": 40}))
    model = build(transformers.LlamaForCausalLM, config)
    model(input_ids=torch.zeros(1, 50, dtype=torch.int64))
    with pytest.raises(UnsupportedModel, match="an earlier call of 50 tokens has stretched"):
        tt.TreeEngine(model)
    model(input_ids=torch.zeros(1, 20, dtype=torch.int64))
    rotary = model.model.rotary_emb
    if torch.equal(rotary.inv_freq, rotary.original_inv_freq):
        tt.TreeEngine(model)
    else:  # some releases of transformers never set them back
        with pytest.raises(UnsupportedModel, match="or load it anew"):
            tt.TreeEngine(model)


def test_attention_without_a_soft_cap_is_refused_and_never_what_the_loader_chooses(tmp_path):
    model = make_model("gemma2", torch.float64)
    capped = linear.score_rows(model, ROWS)[0]
    model.save_pretrained(tmp_path)
    model.config._attn_implementation_internal = "sdpa"  # some releases of transformers choose it by themselves
    with contextlib.suppress(ValueError):  # others refuse it too
        uncapped = linear.score_rows(model, ROWS)[0]
        assert linear.relative_error(torch.cat(uncapped), torch.cat(capped)) > 0.01
    with pytest.raises(UnsupportedModel, match=r"attn_logit_softcapping=1\.5, but its own attention \(sdpa\) has no"):
        tt.TreeEngine(model)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(tt.logprobs(model, ROWS), capped, rtol=1e-6, atol=1e-6)

    loaded = load_model(tmp_path, dtype="float64")
    assert loaded.config._attn_implementation == "eager" and check_config(loaded.config) is not None
    torch.testing.assert_close(linear.score_rows(loaded, ROWS)[0], capped, rtol=1e-6, atol=1e-6)
    with pytest.raises(UnsupportedModel, match='attn_implementation="eager"'):
        load_model(tmp_path, attn_implementation="sdpa")
