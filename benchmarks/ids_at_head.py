"""Time of the LM head with further ids at each prediction, against the head alone; both in turns.

    python benchmarks/ids_at_head.py --ids 8 --vocabulary 32768

Forward and backward of `score_edges` on random states, without known gradients, as in a policy loss: `--rows` states
that predict one token each, and `--ids` further ids of each state on the other side.
"""

import argparse
import statistics
import time

import torch
from torch import nn

from treetrain.core.head.lm_head import Edges, ScoreRequest, score_edges
from treetrain.kernels.lm_head import DeviceHeadKernels


def edges_of(rows: int, ids: int, vocabulary: int, device: torch.device) -> Edges:
    """Different targets of each row, sorted by row."""
    targets = torch.randint(vocabulary, (rows, 1 + ids), device=device)
    row = torch.arange(rows, device=device).repeat_interleave(1 + ids)
    return Edges(
        rows=torch.arange(rows, device=device), edge_row=row, targets=targets.flatten(), host_edge_row=row.cpu().numpy()
    )


def seconds_of(states: torch.Tensor, head: nn.Linear, edges: Edges) -> float:
    """One forward and backward."""
    gpu = states.device.type == "cuda"
    if gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    request = ScoreRequest(kernels=DeviceHeadKernels())
    scores = score_edges(states, head, head, edges, request, fused=True, vocab_size=head.out_features)
    scores.logprobs.square().sum().backward()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rows", 512), ("hidden", 512), ("vocabulary", 32768), ("ids", 8), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    states = torch.randn(options.rows, options.hidden, device=device, dtype=dtype, requires_grad=True)
    head = nn.Linear(options.hidden, options.vocabulary, bias=False, device=device, dtype=dtype)
    both = [edges_of(options.rows, ids, options.vocabulary, device) for ids in (0, options.ids)]
    times: list[list[float]] = [[], []]
    for number in range(options.rounds + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            seconds = seconds_of(states, head, both[which])
            if number:  # the first round warms up
                times[which].append(seconds)
    ratios = [after / before for before, after in zip(*times)]
    alone, with_ids = (statistics.median(own) for own in times)
    print(f"{device.type} {dtype}: alone {alone:.4f} s, with {options.ids} ids {with_ids:.4f} s")
    print(
        f"ratio of medians {with_ids / alone:.3f}, median of ratios {statistics.median(ratios):.3f}, "
        f"of minima {min(times[1]) / min(times[0]):.3f}"
    )


if __name__ == "__main__":
    main()
