"""Measured speed-up of a tree over the best linear baseline, against the FLOP-ideal, for families that are not dense.

Run: python benchmarks/families.py [model ...] [--workload tau_airline_think] [--repeats 5] [--trial 4]

Forward and backward of SFT, float32, on small random models of the real classes: a mixture of
experts shaped like Qwen3-MoE, a hybrid of gated delta and attention layers shaped like Qwen3.5, and a hybrid of Mamba-2
and attention layers shaped like Granite 4. All linear
baselines (packed and padded, two sizes each) run on every fourth row; the fastest and the tree then alternate on all
rows, in a fresh process per model. Rows are appended to results/families.csv.
"""

import os

import rows
from workloads import VOCAB, WORKLOADS, load_workload

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


def measure(name: str, workload: str, repeats: int, trial: int) -> None:
    """Benchmark one model in this process and append its row."""
    import torch

    from treetrain.check.bench import bench

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rows.keep_memory()
    torch.manual_seed(0)
    model = MODELS[name]()
    tasks = load_workload(workload)
    tried = bench(model, tasks[::trial], repeats=1)  # a round of all takes minutes
    report = bench(model, tasks, repeats=repeats, baselines=[tried.baseline])
    row = {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "workload": workload,
        **rows.of_bench(report),
    }
    rows.append("families", row)
    print(row, flush=True)


if __name__ == "__main__":
    rows.run_each(
        MODELS,
        measure,
        __doc__,
        workload={"default": "tau_airline_think", "choices": WORKLOADS},
        repeats=rows.count(5),
        trial={"type": int, "default": 4, "help": "baselines are tried on every so many-th row; 1: on all"},
    )
