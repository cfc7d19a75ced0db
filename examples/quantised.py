"""LoRA on a quantised model: bitsandbytes NF4 or int8, or torchao int8, on the recorded countdown games.

    python -m examples.quantised --kind nf4
    python -m examples.quantised --kind torchao-int8 --model Qwen/Qwen3-0.6B

The base weights are quantised while they are loaded and stay as they are; the adapter is trained. Before the first
step, its gradient on a few rows is compared with that of each row alone.
"""

import argparse
import random
import tempfile
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import treetrain as tt
from examples.countdown.agent import RECORDED, TASKS, TEMPLATE

KINDS = ("nf4", "int8", "torchao-int8")


def quantization_config(kind: str, dtype: torch.dtype) -> Any:
    """The configuration for `from_pretrained`."""
    if kind == "torchao-int8":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def load(name: str, kind: str, dtype: torch.dtype) -> Any:
    """Load a hub id, a folder or a built-in model with quantised weights, and put an adapter on it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"quantization_config": quantization_config(kind, dtype), "dtype": dtype, "device_map": device}
    with tempfile.TemporaryDirectory() as folder:
        if name in ("tiny", "small"):  # built in: saved once, so that transformers quantises it while loading
            tt.load_model(name).save_pretrained(folder)
        base = AutoModelForCausalLM.from_pretrained(folder if name in ("tiny", "small") else name, **options)
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    # Training mode before the first forward: in evaluation mode bitsandbytes may pack 4-bit weights for inference.
    return get_peft_model(base, lora).train()


def gradient(model: Any) -> torch.Tensor:
    """The adapter's gradient, which is then cleared."""
    found = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def difference(model: Any, engine: tt.TreeEngine, rows: list[tt.Trajectory]) -> float:
    """The relative difference between the gradients of the tree and of each row alone."""
    engine.forward_backward(rows, tt.losses.sft())
    tree, weights = gradient(model), sum(float(row.weights[1:].sum()) for row in rows)
    for row in rows:
        ids = torch.as_tensor(row.ids, device=model.device)[None]
        logps = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        (-(logps * torch.as_tensor(row.weights[1:]).to(logps)).sum() / weights).backward()
    alone = gradient(model)
    return float((tree - alone).norm() / alone.norm())


def main(
    model: str = "tiny", kind: str = "nf4", steps: int = 10, lr: float = 1e-3, seed: int = 0, bfloat16: bool = False
) -> tuple[float, list[float]]:
    """Train the adapter; returns the difference of the first gradients, and the loss of every step in nats."""
    torch.manual_seed(seed)
    tokenizer = tt.load_tokenizer(model)
    template = TEMPLATE if model in ("tiny", "small") else None
    loaded = tt.load(RECORDED, tokenizer=tokenizer, chat_template=template, tools="none")
    rows = [row for row in loaded.trajectories if row.group in TASKS]
    trained = load(model, kind, torch.bfloat16 if bfloat16 else torch.float32)
    engine, draws = tt.TreeEngine(trained, budget=8192), random.Random(seed)
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)

    apart = difference(trained, engine, rows[:4])
    print(f"{kind}: the gradients of tree and rows differ by {apart:.1e}")
    losses = []
    for step in range(steps):
        result = engine.forward_backward(draws.sample(rows, min(8, len(rows))), tt.losses.sft())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss)
        print(f"step {step}: loss {result.loss:.3f}, {result.computed_tokens} of {result.flat_tokens} tokens computed")
    return apart, losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="LoRA on a quantised model.")
    parser.add_argument("--model", default="tiny", help="hub id, folder, or a built-in model (tiny, small)")
    parser.add_argument("--kind", choices=KINDS, default="nf4")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16")
    main(**vars(parser.parse_args()))
