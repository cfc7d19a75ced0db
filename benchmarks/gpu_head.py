"""Stage 3 of the GPU benchmark: the LM head with softmax and loss, in PyTorch operations and in Triton kernels.

Each is first compared with float64 on a few rows, then timed: a loss whose gradient is known beforehand (SFT: one pass
over the logits) and one that is not (PPO with entropy: log-probabilities first, gradients in backward). The steps use
the one that is correct and faster in both.
"""

import os
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from gpu_rows import Out, device, forget, seconds, wait
from treetrain.engine.lm_head import ENVIRONMENT, KERNELS, Edges, ScoreRequest, score_edges
from treetrain.softmax_attention.backends import why_not

HEADS = {"0.6b": (1024, 151_936), "8b": (4096, 151_936)}
"""Hidden size and vocabulary."""
LOSSES = ("known gradient", "with entropy")
ROWS, CHECKED = 8192, 192
BOUND = 1.5
"""How much further from float64 the kernels may be than PyTorch's operations are."""


def made(hidden: int, vocabulary: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, nn.Linear, Edges, Tensor]:
    """Hidden states, head, one edge per row and a few forks, and the weight of each edge."""
    generator = torch.Generator(device=device()).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device())

    head = nn.Linear(hidden, vocabulary, bias=False, device=device(), dtype=dtype)
    head.weight.data.copy_(randn(vocabulary, hidden) * 2 / hidden**0.5)
    numbers = torch.arange(rows, device=device())
    edge_row = torch.cat([numbers, numbers[::16]]).sort().values
    targets = torch.randint(vocabulary, (len(edge_row),), generator=generator, device=device())
    edges = Edges(rows=numbers, edge_row=edge_row, targets=targets, host_edge_row=edge_row.cpu().numpy())
    return randn(rows, hidden).to(dtype).requires_grad_(), head, edges, randn(len(edge_row))


def both_ways(loss: str, hidden: Tensor, head: nn.Linear, edges: Edges, counts: Tensor) -> list[Tensor]:
    """Log-probabilities and the gradients of hidden states and matrix."""
    entropy = loss == "with entropy"
    scores = score_edges(
        hidden,
        head,
        head,
        edges,
        ScoreRequest(temperature=0.9, need_entropy=entropy, coefficients=None if entropy else counts),
        fused=True,
        vocab_size=head.out_features,
    )
    total = (scores.logprobs * counts).sum() if scores.linear_loss is None else scores.linear_loss
    if scores.entropies is not None:
        total = total + 0.1 * scores.entropies.sum()
    return [scores.logprobs.detach(), *torch.autograd.grad(total, [hidden, head.weight])]


def errors(name: str, loss: str, hidden: int, vocabulary: int) -> list[float]:
    """||got - truth|| / ||truth|| of a few rows, in 16 bits on a GPU."""
    dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
    x, head, edges, counts = made(hidden, vocabulary, min(CHECKED, vocabulary), dtype)
    os.environ[ENVIRONMENT] = name
    got = both_ways(loss, x, head, edges, counts)
    os.environ[ENVIRONMENT] = "torch"
    truth = both_ways(loss, x.detach().double().requires_grad_(), head.double(), edges, counts.double())
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, truth)]


def measured(name: str, loss: str, hidden: int, vocabulary: int, rows: int, repeats: int) -> tuple[float, int]:
    """Median seconds forward and backward, and the peak of memory above the inputs."""
    tensors = made(hidden, vocabulary, rows, torch.bfloat16)
    os.environ[ENVIRONMENT] = name
    found = statistics.median(seconds(lambda: both_ways(loss, *tensors), repeats, 2.0))
    if device().type != "cuda":
        return found, 0
    wait()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both_ways(loss, *tensors)
    return found, torch.cuda.max_memory_allocated() - before


def product_seconds(hidden: int, vocabulary: int, rows: int, repeats: int) -> float:
    """Seconds of one of the three products of all rows: a third of a head without softmax."""
    left = torch.randn(rows, hidden, device=device(), dtype=torch.bfloat16)
    right = torch.randn(hidden, vocabulary, device=device(), dtype=torch.bfloat16)
    step = max(1, min(rows, (1 << 28) // vocabulary))
    return statistics.median(seconds(lambda: [left[i : i + step] @ right for i in range(0, rows, step)], repeats, 1.0))


def run(out: Out, smoke: bool) -> None:
    """Run the stage and record which is faster."""
    known = os.environ.get(ENVIRONMENT)
    names = [name for name in KERNELS if name == "torch" or why_not("triton", device()) is None]
    ratios: dict[str, list[float]] = {name: [] for name in names}
    try:
        for model, (hidden, vocabulary) in {"smoke": (16, 300)}.items() if smoke else HEADS.items():
            _compare(out, model, hidden, vocabulary, names, ratios, rows=40 if smoke else ROWS, smoke=smoke)
    finally:
        os.environ.pop(ENVIRONMENT, None)
        if known is not None:
            os.environ[ENVIRONMENT] = known
    best = {name: max(found) for name, found in ratios.items() if found}
    if best:
        out.tune(head=min(best, key=lambda name: best[name]))


def _compare(
    out: Out, model: str, hidden: int, vocabulary: int, names: list[str], ratios: dict[str, list[float]], *, rows: int,
    smoke: bool,
) -> None:  # fmt: skip
    repeats = 1 if smoke else 5
    product = product_seconds(hidden, vocabulary, rows, repeats)
    for loss in LOSSES:
        own: list[float] = []
        plain = 0.0
        for name in names:
            row: dict[str, Any] = {"model": model, "hidden": hidden, "vocabulary": vocabulary, "rows": rows}
            row |= {"loss": loss, "kernels": name, "error_logprobs": "", "error_hidden": "", "error_matrix": ""}
            row |= {"verdict": "", "ms": "", "products_ms": 3e3 * product, "above_gb": "", "note": ""}
            try:
                if out.left < 5 and not smoke:
                    raise TimeoutError("skipped: no time left")
                found = errors(name, loss, hidden, vocabulary)
                own = own or found
                right = all(error <= BOUND * limit + 1e-6 for error, limit in zip(found, own))
                row |= dict(zip(("error_logprobs", "error_hidden", "error_matrix"), found))
                row["verdict"] = "right" if right else "WRONG"
                taken, peak = measured(name, loss, hidden, vocabulary, rows, repeats)
                plain = plain or taken
                row |= {"ms": 1e3 * taken, "above_gb": peak / 1e9}
                ratios[name].append(taken / plain if right else float("inf"))
            except Exception as error:
                ratios[name].append(float("inf"))
                row["note"] = f"{type(error).__name__}: {str(error)[:120]}".replace(",", ";").replace("\n", " ")
            out.write("gpu_head", row)
            forget()
