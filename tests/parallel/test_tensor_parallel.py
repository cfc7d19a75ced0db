"""Ranks that transformers divides a model over by its `tp_plan` take the step of one process."""

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_steps import KEYS, Job, check, cut, gradients, relative_error, rows_of, scored_step, with_lora
from torch import Tensor
from torch.distributed.tensor import DTensor

import treetrain as tt
from support.models import make_model
from treetrain.check.contract import PureFloat64
from treetrain.core.errors import RanksDisagree
from treetrain.parallel.tensor_parallel import tensor_parallel_ranks


def refusal(call: Any) -> str:
    """The message of the UnsupportedModel that a call raises."""
    try:
        call()
    except (tt.UnsupportedModel, RanksDisagree) as error:
        return str(error)
    return "nothing"


def refused(group: Any, case: str) -> str:
    """How a use is refused that cannot be exact."""
    model: Any = make_model("qwen3", num_key_value_heads=2)
    options: dict[str, Any] = {}
    if case in ("group", "context"):
        options[case] = group
    if case == "style":
        model._tp_plan["model.norm"] = "sequence_parallel"
    if case == "heads":
        model = make_model("qwen3", num_attention_heads=3, num_key_value_heads=3, hidden_size=24, head_dim=8)
    if case == "vocabulary":
        model = make_model("qwen3", num_attention_heads=4, num_key_value_heads=4, vocab_size=5)
    if case == "compiled":
        options["compile_layers"] = True
    experts: dict[str, Any] = {}
    if case in ("LoRA of experts", "expert style", "expert ranks of their own"):
        model = make_model("qwen3_moe", num_key_value_heads=2)
        experts["ep_size"] = 2
    if case == "other heads":  # its norms have names of their own, and its plan leaves them out
        model = make_model("phi", qk_layernorm=True, num_key_value_heads=2)
    model = cut(model, group, **experts)
    if case == "expert style":
        model._ep_plan["model.layers.*.mlp"] = "sequence_parallel"
    if case == "expert ranks of their own":
        model.config.distributed_config.fsdp_size, model._tp_size = 2, 1
    if case == "LoRA of the head":
        model = with_lora(model, "lm_head")
    if case == "LoRA of experts":
        model = with_lora(model, target_parameters=["mlp.experts.gate_up_proj"])
    if case == "other seeds":
        model = with_lora(model, "q_proj", seed=dist.get_rank(group))
    if case == "other heads":
        return refusal(lambda: tt.TreeEngine(model).forward_backward([tt.Trajectory([1, 2, 3])], tt.losses.sft()))
    return refusal(lambda: tt.TreeEngine(model, **options))


def accumulated(group: Any) -> dict[str, float]:
    """Relative errors of the norms' gradients after two backwards: of plain transformers; then of the engine."""
    outcome = {}
    for first in ("plain", "tree"):
        for second in ("plain", "tree"):
            model = make_model("qwen3", dtype=torch.float64, num_key_value_heads=2)
            alone = copy.deepcopy(model)
            cut(model, group)
            for each in (model, alone):
                engine = tt.TreeEngine(each)
                for how, ids in ((first, [1, 2, 3, 4]), (second, [5, 6, 7])):
                    row = torch.tensor([ids])
                    if how == "plain":
                        each(input_ids=row, labels=row, use_cache=False).loss.backward()
                    else:
                        with PureFloat64():
                            engine.forward_backward([tt.Trajectory(ids)], tt.losses.sft())
            found, truth = (x.model.layers[0].self_attn.q_norm.weight.grad for x in (model, alone))
            outcome[f"{first}, {second}"] = float((found - truth).norm() / truth.norm())
    return outcome


def live(group: Any) -> float:
    """The largest error of log-probabilities within autograd, of their gradients, and of statistics."""
    model = make_model("qwen3", dtype=torch.float64, num_key_value_heads=2)
    alone, rows = copy.deepcopy(model), [[1, 2, 3, 4], [1, 2, 5], [1, 6, 7, 8, 9]]
    for start in range(4):  # rows of the most likely tokens, of both ranks' shares
        rows.append([start, 9])
        for _ in range(5):
            rows[-1].append(int(alone(torch.tensor([rows[-1]]), use_cache=False).logits[0, -1].argmax()))

    def loss(logprobs: list[Tensor], entropies: Any) -> Tensor:
        return torch.cat(logprobs).exp().sum() + torch.cat(entropies).square().sum()

    cut(model, group)
    with PureFloat64():
        found = tt.logprobs(model, rows, budget=3, return_entropy=True)
        loss(*found).backward()
        outcome = tt.TreeEngine(model).score(rows, statistics=True)
        truth = tt.TreeEngine(alone).score(rows, statistics=True, entropies=True)
        loss(truth.logprobs, truth.entropies).backward()
        truth.backward()
    pairs = [(outcome.is_top1, truth.is_top1), (outcome.mean_logits, truth.mean_logits), (found[0], truth.logprobs)]
    pairs += [(outcome.log_sum_sq_probs, truth.log_sum_sq_probs), (found[1], truth.entropies)]
    errors = [float((torch.cat(a).double() - torch.cat(b).double()).abs().max()) for a, b in pairs]  # type: ignore[arg-type]
    return max(relative_error(gradients(model), gradients(alone)), *errors)


def loaded(group: Any, folder: str) -> dict[str, Any]:
    """A step and `tt.verify` of a model that `from_pretrained` divides over all processes, in float32."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    size = dist.get_world_size(group)
    plan = DistributedConfig(tp_plan="auto", tp_size=size, ep_size=1 if folder.endswith("qwen3") else size)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan).eval()
    alone, rows = AutoModelForCausalLM.from_pretrained(folder).eval(), rows_of(0, "sft")
    for each in (model, alone):
        tt.TreeEngine(each, budget=4).forward_backward(rows, tt.losses.sft())
    error = relative_error(gradients(model), gradients(alone))
    peaks = [tt.TreeEngine(each).cost.peak_bytes(tt.TreeEngine(each).plan(rows)) for each in (model, alone)]
    return {"gradients": error, "peaks": peaks, "verified": tt.verify(model, rows).passed}


def few_tokens(group: Any, tokens: int) -> float:
    """The error of a step of so few tokens that some ranks send none, and some experts get none."""
    model = make_model("qwen3_moe", dtype=torch.float64, num_key_value_heads=2)
    alone, rows = copy.deepcopy(model), [tt.Trajectory([1, *range(5, 5 + tokens)])]
    with PureFloat64():
        for each in (cut(model, group, ep_size=2), alone):
            tt.TreeEngine(each, budget=1).forward_backward(rows, tt.losses.sft())
    return relative_error(gradients(model), gradients(alone))


def adapted(group: Any, family: str) -> float:
    """The error of a step over two calls that trains a LoRA on every projection of a layer but those of experts.

    A model with experts has them divided over the ranks, and its rows say which experts they used.
    """
    model = make_model(family, dtype=torch.float64, num_key_value_heads=2)
    rows, loss = rows_of(0, "ppo entropy"), tt.losses.ppo(entropy=0.05)
    targets, experts = ["q_proj", "k_proj", "v_proj", "o_proj"], {}
    if family == "qwen3":
        targets += ["gate_proj", "up_proj", "down_proj"]
    else:
        experts, rng = {"ep_size": 2}, np.random.default_rng(0)
        rows = [
            row.replace(experts=np.stack([rng.permutation(4)[:2] for _ in range(2 * len(row))]).reshape(-1, 2, 2))
            for row in rows
        ]
    divided, alone = with_lora(cut(copy.deepcopy(model), group, **experts), *targets), with_lora(model, *targets)
    for own, whole in zip(divided.parameters(), alone.parameters()):
        whole.data.copy_(own.full_tensor() if isinstance(own, DTensor) else own)
    for lora in (divided, alone):
        with PureFloat64():
            for part in (rows[::2], rows[1::2]):
                tt.TreeEngine(lora, budget=4).forward_backward(part, loss, 10.0)
    return relative_error(gradients(divided), gradients(alone))


def trapped(group: Any, trap: str) -> str:
    """Return this rank's error when rank 1 has other rows or a bad one."""
    model, rows = cut(make_model("qwen3", num_key_value_heads=2), group), rows_of(0, "sft")
    if dist.get_rank(group) == 1:
        rows = rows[:-1] if trap == "other rows" else [*rows, tt.Trajectory([1, 10_000])]
    try:
        tt.TreeEngine(model, budget=4).forward_backward(rows, tt.losses.sft())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


AUXILIARY = (("output_router_logits", True), ("router_aux_loss_coef", 0.7))
WHOLE = {f"model.layers.*.self_attn.{name}": "replicate" for name in ("q_norm", "k_norm", "o_proj")} | {
    f"model.layers.*.self_attn.{name}_proj": "replicate" for name in "qkv"
}
pytest.importorskip("transformers.distributed.tensor_parallel", reason="this transformers cuts models in another way")


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", ["one segment per part", "chunks of 7", "shared prefill"])
@pytest.mark.parametrize("keep", ["none", "all", "mixed"])
@pytest.mark.parametrize("loss", ["ppo entropy", "gspo", "dpo"])
def test_a_step_under_any_plan(run_on_ranks, shape, keep, loss):
    check(run_on_ranks, Job("tensor", loss, changes=KEYS, shapes=((shape, keep),) * 2))


SMALL_PARTS = (("chunks of 2", "mixed"),) * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", ()),  # windows, capped scores and logits
        ("gpt_oss", ()),  # sinks, windows, experts
        ("qwen3_moe", (("output_router_logits", True),)),
        ("glm4_moe", ()),  # its plan leaves the norms of queries and keys out
        ("qwen3_5_text", ()),  # recurrent layers
        ("llama", (("tie_word_embeddings", True),)),
        ("qwen3", (("vocab_size", 41),)),  # the last rank has a token less
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_kinds_of_layers_and_heads(run_on_ranks, family, changes):
    check(run_on_ranks, Job("tensor", "ppo entropy", family=family, changes=KEYS + changes, shapes=SMALL_PARTS))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "changes", "divided"),
    [
        ("qwen3_moe", AUXILIARY, ()),
        pytest.param("qwen3_moe", AUXILIARY, (("ep_implementation", "all_reduce"),), marks=pytest.mark.slow),
        pytest.param(
            "qwen3_moe", (), (("tp_plan", WHOLE),), marks=pytest.mark.slow
        ),  # only the experts are divided, and embedding and head
        pytest.param("mixtral", (), (), marks=pytest.mark.slow),
        ("gpt_oss", (), (("ep_implementation", "all_to_all"),)),
        pytest.param("qwen3_next", (), (), marks=pytest.mark.slow),  # recurrent layers, shared experts
        pytest.param("deepseek_v3", (("num_key_value_heads", 4),), (), marks=pytest.mark.slow),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_experts_divided_over_ranks(run_on_ranks, family, changes, divided):
    changes = KEYS + changes
    check(run_on_ranks, Job("expert", "ppo entropy", family, changes, divided=divided, budget=4))


@pytest.mark.slow
def test_divided_experts_with_values_checkpointed_layers_and_several_calls(run_on_ranks):
    job = Job("expert", "sft", family="qwen3_moe", changes=KEYS, budget=4)
    check(run_on_ranks, dataclasses.replace(job, loss="value", value_head=True, checkpointing=True))
    check(run_on_ranks, dataclasses.replace(job, calls=3, dtype=torch.float32))
    for outcome in run_on_ranks(
        scored_step, "expert", (("chunks of 7", "mixed"),) * 2, ("partly",), 2, "round", ("qwen3_moe", KEYS)
    ):
        assert outcome["error"] <= 1e-12, outcome


@pytest.mark.parametrize("tokens", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_expert_or_a_rank_without_tokens(run_on_ranks, tokens):
    for outcome in run_on_ranks(few_tokens, tokens):
        assert outcome <= 1e-12


@pytest.mark.slow
def test_values_checkpointed_layers_and_several_calls(run_on_ranks):
    check(run_on_ranks, Job("tensor", "value", changes=KEYS, value_head=True, budget=4))
    check(run_on_ranks, Job("tensor", "ppo entropy", changes=KEYS, checkpointing=True, budget=4))
    check(run_on_ranks, Job("tensor", "sft", changes=KEYS, calls=3, budget=4))
    check(run_on_ranks, Job("tensor", "grpo", changes=KEYS, dtype=torch.float32, budget=4))


@pytest.mark.slow
@pytest.mark.parametrize("keeps", ["partly", "kept", "recomputed"])
def test_score_now_and_backward_later(run_on_ranks, keeps):
    plans = (("chunks of 7", "mixed"),) * 2
    for outcome in run_on_ranks(scored_step, "tensor", plans, (keeps,), 2, "round", ("qwen3", KEYS)):
        assert outcome["error"] <= 1e-12, outcome


def test_log_probabilities_within_autograd_and_statistics(run_on_ranks):
    assert max(run_on_ranks(live)) <= 1e-12


@pytest.mark.slow
def test_gradients_of_norms_accumulate_over_calls_where_plain_transformers_counts_the_first_twice(run_on_ranks):
    for outcome in run_on_ranks(accumulated):
        wrong = outcome.pop("plain, plain")
        assert wrong > 0.1, (
            "transformers accumulates them rightly now: `tensor_parallel_mode` may not be needed any more"
        )
        # A plain backward after ours multiplies what it finds in the same way: out of our hands.
        outcome.pop("tree, plain")
        assert max(outcome.values()) <= 1e-12, outcome


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_lora_on_column_and_row_wise_layers_and_recorded_experts(run_on_ranks, family):
    pytest.importorskip("peft")
    assert max(run_on_ranks(adapted, family)) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_a_model_that_from_pretrained_divides_over_four_ranks(run_on_ranks, tmp_path, family):
    make_model(family, vocab_size=40, num_attention_heads=4, num_key_value_heads=4).save_pretrained(tmp_path / family)
    for outcome in run_on_ranks(loaded, str(tmp_path / family), size=4):
        assert outcome["gradients"] <= 1e-5 and outcome["verified"], outcome
        assert outcome["peaks"][0] == outcome["peaks"][1], outcome


def test_what_cannot_be_exact_is_refused_by_name_before_any_work(run_on_ranks):
    for case, size, words in (
        ("heads", 2, "3 heads, 3 heads of keys and values and a vocabulary of 37, which 2 tensor-parallel ranks"),
        ("heads", 2, "tp_size=1 or 3 can"),
        ("vocabulary", 4, "a vocabulary of 5, which 4 tensor-parallel ranks cannot share; tp_size=1 or 2 can"),
        ("style", 2, "divides model.norm by the style 'sequence_parallel'"),
        ("group", 2, "data parallel (group="),
        ("context", 2, "context parallel (context=)"),
        ("compiled", 2, "compile_layers=True"),
        ("LoRA of the head", 2, "lm_head has 37 outputs, its adapter"),
        ("LoRA of experts", 2, "adapts gate_up_proj, which is divided over the ranks"),
        ("expert style", 2, "the ep_plan of Qwen3MoeForCausalLM divides"),
        ("expert ranks of their own", 2, "tp_size=1, ep_size=2, pp_size=1, fsdp_size=2"),
        ("other heads", 2, "holds model.layers.0.self_attn.q_layernorm.weight whole, but the sizes of its gradient"),
        ("other seeds", 2, "make new weights, such as an adapter's, from the same seed on every rank"),
    ):
        for outcome in run_on_ranks(refused, case, size=size):
            assert words in outcome, (case, outcome)
    model = make_model("qwen3")
    model._tp_size = 2  # type: ignore[assignment]
    with pytest.raises(tt.UnsupportedModel, match="its weights lie on those of none"):
        tensor_parallel_ranks(model)


def test_an_error_on_one_rank_ends_all_of_them_with_its_message(run_on_ranks):
    for trap, words in (("bad row", "10000"), ("other rows", "rows")):
        for rank, outcome in enumerate(run_on_ranks(trapped, trap)):
            assert words in outcome and (outcome.startswith("RanksDisagree") or rank == 1), (trap, rank, outcome)
