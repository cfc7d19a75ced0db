"""Models in the hands of transformers' tensor parallelism, and what tests run on their ranks."""

import copy
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import treetrain as tt
from support.models import make_model
from treetrain.errors import RanksDisagree
from treetrain.testing.contract import PureFloat64


def cut(model: Any, group: Any, **experts: Any) -> nn.Module:
    """Divide a model over a group by its own plans, as `from_pretrained` does over all processes there are."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    size, head = dist.get_world_size(group), model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())  # tied again below, as after loading
    settings = DistributedConfig(tp_size=size, **{"tp_plan": "auto"} | experts)
    model.config.distributed_config = settings
    plan, ep_plan, _ = model._resolve_parallel_plans(settings)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    apply_tensor_parallelism(model, mesh, plan)
    ep_mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))
    apply_expert_parallelism(model, ep_mesh, mesh, ep_plan, settings.ep_implementation)
    model._tp_size, model._device_mesh = size, mesh
    model.tie_weights()
    return model


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
    if case in ("LoRA of experts", "expert style", "kernel", "eager gpt-oss", "expert ranks of their own"):
        model = make_model("gpt_oss" if case == "eager gpt-oss" else "qwen3_moe", num_key_value_heads=2)
        experts["ep_size"] = 2
    if case == "other heads":  # its norms have names of their own, and its plan leaves them out
        model = make_model("phi", qk_layernorm=True, num_key_value_heads=2)
    model = cut(model, group, **experts)
    if case == "expert style":
        model._ep_plan["model.layers.*.mlp"] = "sequence_parallel"
    if case == "kernel":
        model.config.distributed_config.ep_implementation = "deepgemm_megamoe"
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
    told = {}
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
            told[f"{first}, {second}"] = float((found - truth).norm() / truth.norm())
    return told


def live(group: Any) -> float:
    """The largest error of log-probabilities within autograd, of their gradients, and of statistics."""
    from support.rank_work import gradients, relative_error

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
        told = tt.TreeEngine(model).score(rows, statistics=True)
        truth = tt.TreeEngine(alone).score(rows, statistics=True, entropies=True)
        loss(truth.logprobs, truth.entropies).backward()
        truth.backward()
    pairs = [(told.is_top1, truth.is_top1), (told.mean_logits, truth.mean_logits), (found[0], truth.logprobs)]
    pairs += [(told.log_sum_sq_probs, truth.log_sum_sq_probs), (found[1], truth.entropies)]
    errors = [float((torch.cat(a).double() - torch.cat(b).double()).abs().max()) for a, b in pairs]  # type: ignore[arg-type]
    return max(relative_error(gradients(model), gradients(alone)), *errors)


def loaded(group: Any, folder: str) -> dict[str, Any]:
    """A step and `tt.verify` of a model that `from_pretrained` divides over all processes, in float32."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from support.rank_work import gradients, relative_error, rows_of

    size = dist.get_world_size(group)
    plan = DistributedConfig(tp_plan="auto", tp_size=size, ep_size=1 if folder.endswith("qwen3") else size)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan).eval()
    alone, rows = AutoModelForCausalLM.from_pretrained(folder).eval(), rows_of(0, "sft")
    for each in (model, alone):
        tt.TreeEngine(each, budget=4).forward_backward(rows, tt.losses.sft())
    error = relative_error(gradients(model), gradients(alone))
    peaks = [tt.TreeEngine(each).cost.peak_bytes(tt.TreeEngine(each).plan(rows)) for each in (model, alone)]
    return {"gradients": error, "peaks": peaks, "verified": tt.verify(model, rows).passed}


def with_lora(model: Any, *targets: str, seed: int = 0, **options: Any) -> nn.Module:
    """The model with a LoRA that is not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    settings = LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False, **options)
    return get_peft_model(model, settings).eval()


def few_tokens(group: Any, tokens: int) -> float:
    """The error of a step of so few tokens that some ranks send none, and some experts get none."""
    from support.rank_work import gradients, relative_error

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
    from support.rank_work import gradients, relative_error, rows_of

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
    from support.rank_work import rows_of

    model, rows = cut(make_model("qwen3", num_key_value_heads=2), group), rows_of(0, "sft")
    if dist.get_rank(group) == 1:
        rows = rows[:-1] if trap == "other rows" else [*rows, tt.Trajectory([1, 10_000])]
    try:
        tt.TreeEngine(model, budget=4).forward_backward(rows, tt.losses.sft())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
