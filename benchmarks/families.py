"""The table of headline.py for models that are not dense, on calls of a tool agent.

Run: python benchmarks/families.py [model ...] [--repeats 5] [--dry-run]. Twelve minutes on two cores.

Forward and backward of SFT, float32, on small random models of the real classes: a mixture of experts shaped like
Qwen3-MoE, a hybrid of gated delta and attention layers shaped like Qwen3.5, and a hybrid of Mamba-2 and attention
layers shaped like Granite 4. The rows are calls whose template drops earlier think blocks, so that no row extends
another. Baseline and rounds are those of headline.py, in a fresh process per model. Rows are appended to
results/families.csv; a model that has its row at this commit is left out.
"""

import os

import rows
from workloads import VOCAB, load_workload

WORK = "tool agent, think blocks dropped"

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}


def qwen3_moe():
    """8 layers of 16 experts, 4 for each token: 28M parameters in layers, of which a token uses 11M."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **COMMON,
            num_hidden_layers=8,
            intermediate_size=1152,
            num_experts=16,
            num_experts_per_tok=4,
            moe_intermediate_size=288,
            norm_topk_prob=True,
        )
    )


def qwen3_5_hybrid():
    """12 layers, every fourth with full attention, the others gated delta layers."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    kinds = ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(12)]
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **COMMON,
            num_hidden_layers=12,
            intermediate_size=1152,
            layer_types=kinds,
            linear_num_key_heads=3,
            linear_num_value_heads=6,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_conv_kernel_dim=4,
        )
    )


def granite_4_hybrid():
    """12 layers, every sixth with full attention, the others Mamba-2; dense MLPs."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    kinds = ["full_attention" if number % 6 == 5 else "linear_attention" for number in range(12)]
    shape = {name: value for name, value in COMMON.items() if name != "head_dim"}
    return GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **shape,
            num_hidden_layers=12,
            intermediate_size=1152,
            shared_intermediate_size=1152,
            num_local_experts=0,
            layer_types=kinds,
            mamba_n_heads=12,
            mamba_d_head=64,
            mamba_d_state=128,
            mamba_n_groups=1,
            mamba_chunk_size=256,
        )
    )


MODELS = {"qwen3_moe": qwen3_moe, "qwen3_5_hybrid": qwen3_5_hybrid, "granite_4_hybrid": granite_4_hybrid}


def measure(name: str, repeats: int, dry_run: bool) -> None:
    """Time one model in this process and append its row."""
    if not dry_run and rows.has("families", model=name):
        return print(f"{name}: has its row at this commit")
    import torch

    import rivals

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rows.keep_memory()
    torch.manual_seed(0)
    model, batch = MODELS[name](), load_workload(WORK)
    found = rivals.compare(model, batch, {"tree": rivals.Ours(model, batch)}, repeats)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows.report("families", {"model": name, "parameters": parameters, "work": WORK, **found["tree"]}, dry_run=dry_run)


if __name__ == "__main__":
    rows.run_each(MODELS, measure, __doc__, repeats=rows.count(5), dry_run=rows.DRY_RUN)
