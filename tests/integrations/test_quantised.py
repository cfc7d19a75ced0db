"""LoRA on quantised weights: bitsandbytes NF4 and int8, torchao int8; trees against each row alone, on a CPU."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig, Qwen3Config, Qwen3ForCausalLM, TorchAoConfig

import treetrain as tt
from treetrain.check.contract import TEMPERATURE, expected, measured
from treetrain.core.errors import UnsupportedModel
from treetrain.testing import PPO, SFT, bushy_rows, gradients, relative_error, score_row, with_random_facts

ENVIRONMENT = "it needs an environment of its own: make test-quantised"
KINDS = ["bitsandbytes nf4", "bitsandbytes nf4 twice", "bitsandbytes int8", "torchao int8"]
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


def quantization(kind: str, dtype: torch.dtype, **changes: Any) -> Any:
    """The configuration that `from_pretrained` takes; skips the test without the library."""
    library, name = kind.split(" ", 1)
    pytest.importorskip(library, reason=f"{library} is not installed; {ENVIRONMENT}")
    if library == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(changes.get("quant_type", Int8WeightOnlyConfig()))
    if name == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, **changes)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=name == "nf4 twice",
    )


def quantised(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> peft.PeftModel:
    """A small model with random weights, quantised by transformers, and a LoRA that is not zero."""
    config = quantization(kind, dtype, **changes)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(torch.bfloat16).to(dtype).save_pretrained(folder)
        base = Qwen3ForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype, device_map="cpu")
    lora = peft.LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(base, lora).train()


def forest(seed: int) -> list[tt.Trajectory]:
    """Two trees with forks, one at the first token; rows that are prefixes of rows, duplicates, random facts."""
    bushy = bushy_rows(np.random.default_rng(seed), rows=8, segment=6, levels=3)
    rows = [[5, *row] for row in bushy] + [[5, 6], [5, 6, 7], [5, 6, 7], bushy[0][:3], [9, 8, 7]]
    return with_random_facts(rows, seed)


def dequantised(model: peft.PeftModel) -> nn.Module:
    """The model with the same values in plain float32 weights."""
    from peft.utils.integrations import dequantize_module_weight

    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    plain = peft.get_peft_model(Qwen3ForCausalLM(Qwen3Config(**SHAPE)), lora).train()
    weights: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.dtype.is_floating_point and type(parameter) in (nn.Parameter, torch.Tensor):
                weights[f"{name}.{key}"] = parameter.detach()
            elif key == "weight":
                weights[f"{name}.{key}"] = (
                    parameter.dequantize() if hasattr(parameter, "qdata") else dequantize_module_weight(module)
                ).detach()
    plain.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=True)
    return plain


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_of_the_adapter_are_those_of_each_row_alone(kind):
    model, rows = quantised(kind), forest(1)
    assert not any(parameter.requires_grad for name, parameter in model.named_parameters() if "lora_" not in name)
    for case, (loss, gradient) in zip([SFT, PPO], expected(model, rows, [SFT, PPO])):
        assert gradient.norm() > 0.1
        for budget in (None, 24):
            found, got = measured(model, rows, case, budget=budget)
            assert abs(found - loss) <= 1e-5 * max(1.0, abs(loss))
            assert relative_error(got, gradient) <= 1e-5


@pytest.mark.parametrize("budget", [None, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_score_and_its_backward_are_those_of_each_row_alone(kind, budget):
    model, rows = quantised(kind), forest(2)
    generator = torch.Generator().manual_seed(0)
    advantages = [torch.randn(max(len(row) - 1, 0), generator=generator) for row in rows]
    alone = [score_row(model, row.ids.tolist(), TEMPERATURE)[0] for row in rows]
    loss = sum((a * row).sum() for a, row in zip(advantages, alone))
    assert isinstance(loss, torch.Tensor)
    truth = gradients(model, loss)
    model.zero_grad()
    scored = tt.TreeEngine(model, temperature=TEMPERATURE, budget=budget).score(rows)
    for got, want in zip(scored.logprobs, alone):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.stack([(a * row).sum() for a, row in zip(advantages, scored.logprobs)]).sum().backward()
    scored.backward()
    assert relative_error(gradients(model), truth) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_the_tree_rounds_no_more_than_the_rows(kind):
    model = quantised(kind, torch.bfloat16)
    truth_model, trees, alone = dequantised(model), list[float](), list[float]()
    for seed in (1, 2):
        rows = forest(seed)
        truths = expected(truth_model, rows, [SFT, PPO])
        for case, (_, gradient), (_, truth) in zip([SFT, PPO], expected(model, rows, [SFT, PPO]), truths):
            alone.append(relative_error(gradient, truth))
            trees += [relative_error(measured(model, rows, case, budget=budget)[1], truth) for budget in (None, 24)]
    pooled = [float(np.sqrt(np.mean(np.square(errors)))) for errors in (trees, alone)]
    assert pooled[0] <= 1.5 * pooled[1], pooled
    assert pooled[1] < 0.2  # the dequantised model is the same one


@pytest.mark.parametrize("changes", [{}, {"llm_int8_threshold": 0.0}])
def test_int8_layers_that_quantise_their_inputs_are_refused(changes):
    model = quantised("bitsandbytes int8", **changes)
    engine = tt.TreeEngine(model)
    model.eval()
    with pytest.raises(
        UnsupportedModel, match=r"q_proj.*quantises its inputs in evaluation mode.*Int8WeightOnlyConfig"
    ):
        engine.logprobs([[1, 2, 3], [1, 2, 4]])


def test_activations_that_are_quantised_are_refused():
    pytest.importorskip("torchao", reason=f"torchao is not installed; {ENVIRONMENT}")
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    model = quantised("torchao int8", quant_type=Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(UnsupportedModel, match=r"Int8Tensor\) quantises its inputs\. .*Int8WeightOnlyConfig"):
        tt.TreeEngine(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_weight_that_changes_between_score_and_backward_is_an_error(kind):
    model = quantised(kind)
    scored = tt.TreeEngine(model, budget=24).score(forest(1))
    torch.stack([row.sum() for row in scored.logprobs]).sum().backward()
    weight = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj.base_layer").weight
    getattr(weight, "qdata", weight).data[0] += 1
    with pytest.raises(RuntimeError, match="weight"):
        scored.backward()


def test_4_bit_weights_that_were_packed_for_inference_are_refused():
    model = quantised("bitsandbytes nf4")
    engine = tt.TreeEngine(model)
    with torch.no_grad():
        model.eval()(input_ids=torch.tensor([[1, 2, 3]]))
    model.train()
    packed = [m for m in model.modules() if hasattr(m, "quant_state") and m.support_avx512bf16_for_cpu]
    for module in packed:
        assert module.weight.quant_state.packing_format_for_cpu, "bitsandbytes unpacks them: the refusal can go"
    if not packed:  # this CPU has no AVX512-BF16
        next(m for m in model.modules() if hasattr(m, "quant_state")).weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(UnsupportedModel, match="packed for inference"):
        engine.forward_backward([[1, 2, 3], [1, 2, 4]], tt.losses.sft())


@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao-int8"])
def test_the_example_trains_and_its_gradients_are_those_of_the_rows(kind, monkeypatch):
    pytest.importorskip(kind.split("-")[0] if "torchao" in kind else "bitsandbytes", reason=ENVIRONMENT)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from examples import quantised as example

    apart, losses = example.main(kind=kind, steps=3)
    assert apart <= 1e-5
    assert losses[2] < losses[0]
