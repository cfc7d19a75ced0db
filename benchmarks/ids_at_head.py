"""Time of the LM head with further ids at each prediction, against the head alone; both in turns.

Run: python benchmarks/ids_at_head.py [work ...] [--rounds 31] [--dry-run]. Two minutes on two cores.

Forward and backward of `score_edges` on 512 random states of width 512 that predict one token each, without known
gradients, as in a policy loss; and the same with further ids at each state. A loss that is linear in the
log-probabilities, such as SFT, has its gradients made with them, in one run of the head; with further ids it is no
longer linear, and the head runs twice, unless there is memory to keep its logits. The vocabulary has 32,768 ids. Rows
are appended to results/ids_at_head.csv; a work that has its row at this commit is left out.
"""

import os
import statistics
import time

import torch
from torch import nn

import rows
from treetrain.core.head.lm_head import Edges, ScoreRequest, score_edges
from treetrain.kernels.lm_head import DeviceHeadKernels

STATES, HIDDEN, VOCABULARY = 512, 512, 32_768
WORKS = {"8 ids": 8, "64 ids": 64, "8 ids, loss linear without": 8, "8 ids, loss linear without, logits kept": 8}


def edges_of(ids: int, device: torch.device) -> Edges:
    """Different targets of each state, sorted by state."""
    targets = torch.randint(VOCABULARY, (STATES, 1 + ids), device=device)
    states = torch.arange(STATES, device=device)
    row = states.repeat_interleave(1 + ids)
    return Edges(rows=states, edge_row=row, targets=targets.flatten(), host_edge_row=row.cpu().numpy())


def seconds_of(states: torch.Tensor, head: nn.Linear, edges: Edges, *, linear: bool, kept: bool) -> tuple[float, float]:
    """Seconds of one forward and backward: by the clock, and of the processor."""
    gpu = states.device.type == "cuda"
    if gpu:
        torch.cuda.synchronize()
    start = time.perf_counter(), time.process_time()
    slopes = torch.ones(len(edges.targets), device=states.device) if linear else None
    request = ScoreRequest(kernels=DeviceHeadKernels(), coefficients=slopes, keep_logits=kept)
    scores = score_edges(states, head, head, edges, request, fused=True, vocab_size=VOCABULARY)
    (scores.logprobs.square().sum() if scores.linear_loss is None else scores.linear_loss).backward()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def measure(name: str, rounds: int, dry_run: bool) -> None:
    """Time one number of ids against none, and append a row."""
    if not dry_run and rows.has("ids_at_head", work=name):
        return print(f"{name}: has its row at this commit")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    states = torch.randn(STATES, HIDDEN, device=device, dtype=dtype, requires_grad=True)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False, device=device, dtype=dtype)
    both = [edges_of(ids, device) for ids in (0, WORKS[name])]
    times: list[list[tuple[float, float]]] = [[], []]
    for number in range(rounds + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            linear = which == 0 and "linear" in name
            seconds = seconds_of(states, head, both[which], linear=linear, kept="kept" in name)
            if number:  # the first round warms up
                times[which].append(seconds)
    row = {"work": name, "device": device.type, "states": STATES, "vocabulary": VOCABULARY, "rounds": rounds}
    for kind, column in (("", 0), ("cpu_", 1)):
        alone, with_ids = ([one[column] for one in own] for own in times)
        ratios = [after / before for before, after in zip(alone, with_ids)]
        row |= {
            f"{kind}seconds_alone": f"{statistics.median(alone):.4f}",
            f"{kind}seconds": f"{statistics.median(with_ids):.4f}",
            f"{kind}times": f"{statistics.median(ratios):.3f}",
            f"{kind}times_min": f"{min(ratios):.3f}",
            f"{kind}times_max": f"{max(ratios):.3f}",
        }
    rows.report("ids_at_head", row, dry_run=dry_run)


if __name__ == "__main__":
    rows.run_each(WORKS, measure, __doc__, rounds=rows.count(31), dry_run=rows.DRY_RUN)
