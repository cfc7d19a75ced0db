"""Processor time of a step on narrow layers, where arithmetic is negligible: what a step costs the host of a GPU.

Run: python benchmarks/host_time.py [work ...] [--rounds 15] [--dry-run]

A Qwen3 of 36 layers with a hidden size of 32 runs on one thread. *tree* is the time of an engine's parts of 32 to 64
tokens, forward and backward, with the prefill that comes before them where the trunk runs twice; *plain* is that of as
many passes of the model itself on 32 tokens, forward alone for a prefill. Both are given per layer and part. *prelude*
is the rest of the engine's step: the look at the model, tree, plan, loss. Both sides alternate in one process; the
figures are medians, the ratio that of the rounds.
Rows are appended to results/host_time.csv.
"""

import statistics
import time
import warnings

import rows

LAYERS, TOKENS = 36, 32
WORKS = {
    "dense": {},
    "dense checkpointed": {"checkpointed": True},
    "dense in parts": {"branches": 4},
    "lora": {"lora": True},
    "lora checkpointed": {"lora": True, "checkpointed": True},
    "lora in parts": {"lora": True, "branches": 4},
}


def narrow_model(*, lora: bool = False, checkpointed: bool = False):
    """A Qwen3 of 36 narrow layers; with LoRA on all matrices of its layers; checkpointed layer by layer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).train()
    if lora:
        import peft

        matrices = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        adapter = peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=matrices, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapter)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if lora:
            model.enable_input_require_grads()
    return model


def measure(
    name: str, rounds: int, dry_run: bool, lora: bool = False, checkpointed: bool = False, branches: int = 0
) -> None:
    """Time both sides in this process and report a row."""
    import numpy as np
    import torch

    import treetrain as tt
    from treetrain.core.engine.executor import Executor

    torch.set_num_threads(1)
    model = narrow_model(lora=lora, checkpointed=checkpointed)
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 60, TOKENS).tolist()
    trajectories = [trunk + rng.integers(0, 60, TOKENS).tolist() for _ in range(branches)] or [trunk]
    engine = tt.TreeEngine(model, budget=2 * TOKENS if branches else None)
    loss, ids, in_parts = tt.losses.sft(), torch.tensor([trunk]), [0.0]
    plan = engine.plan(trajectories)
    original = Executor.train

    def train(self):
        start = time.process_time()
        original(self)
        in_parts[0] += time.process_time() - start

    Executor.train = train
    of_plain, of_parts, preludes = [], [], []
    for _ in range(rounds + 2):
        start = time.process_time()
        with torch.no_grad():
            for _ in range(plan.num_prefills):
                model(input_ids=ids, labels=ids, use_cache=False)
        for _ in range(plan.num_parts):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        of_plain.append(1e3 * (time.process_time() - start) / LAYERS / plan.num_parts)
        in_parts[0], start = 0.0, time.process_time()
        result = engine.forward_backward(trajectories, loss)
        whole = time.process_time() - start
        of_parts.append(1e3 * in_parts[0] / LAYERS / plan.num_parts)
        preludes.append(1e3 * (whole - in_parts[0]))
    plain, tree, prelude = (statistics.median(values[2:]) for values in (of_plain, of_parts, preludes))
    ratio = statistics.median(t / p for t, p in zip(of_parts[2:], of_plain[2:], strict=True))
    row = {
        "work": name,
        "layers": LAYERS,
        "parts": plan.num_parts,
        "tokens_run_twice": result.recomputed_tokens,
        "plain_ms": f"{plain:.2f}",
        "tree_ms": f"{tree:.2f}",
        "ratio": f"{ratio:.2f}",
        "prelude_ms": f"{prelude:.1f}",
        "rounds": rounds,
    }
    rows.report("host_time", row, dry_run=dry_run)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    rows.run_each(
        WORKS,
        lambda name, **options: measure(name, **options, **WORKS[name]),
        __doc__,
        rounds=rows.count(15),
        dry_run=rows.DRY_RUN,
    )
