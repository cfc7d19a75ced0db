"""The head's softmax: PyTorch's operations and the Triton kernels against autograd in float64, and within whole steps.

The kernels run on a GPU where there is one, else by Triton's interpreter; without Triton their tests are skipped.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import treetrain as tt
from support.models import make_model
from support.triton_here import GPU, triton_or_skip
from treetrain.check.linear import gradients, relative_error
from treetrain.core.head.lm_head import (
    PLAIN,
    ChunkGradients,
    Edges,
    EdgesOfChunk,
    PlainChunk,
    Scaling,
    ScoreRequest,
    score_edges,
)
from treetrain.core.hf.capability import LogitMap
from treetrain.kernels import checks as kernel_checks
from treetrain.kernels import lm_head as head_kernels
from treetrain.kernels.lm_head import TritonChunk, chunk_type
from treetrain.models.costs import cost_of

DEVICE = torch.device("cuda" if GPU else "cpu")
SCALINGS = {
    "plain": Scaling(),
    "temperature": Scaling(LogitMap(), 0.7),
    "factor, divisor, temperature": Scaling(LogitMap(factor=3.0, divisor=2.0), 1.3),
}
EDGES = ([0, 1, 1, 1, 3, 4, 4], [5, 0, 36, 17, 36, 2, 2])
"""Forks, a row of which nothing is predicted, and one token predicted twice from one row."""


def chunk_of(kind: type[PlainChunk], dtype: torch.dtype, scaling: Scaling, vocabulary: int, *, entropy: bool):
    """Results of a kind of chunk, and expected ones: (log-sum-exps, log-probabilities, entropies or None, gradient)."""
    generator = torch.Generator().manual_seed(vocabulary)
    rows, weight = (torch.randn(n, 8, generator=generator).to(DEVICE, dtype) for n in (5, vocabulary))
    weight = weight * 3
    numbers = torch.tensor([[r % 5, t % vocabulary] for r, t in zip(*EDGES)], device=DEVICE)
    edges = EdgesOfChunk(numbers[:, 0].contiguous(), numbers[:, 1].contiguous())
    wide = torch.promote_types(dtype, torch.float32)
    by_edge, by_entropy = (torch.randn(n, generator=generator).to(DEVICE, wide) for n in (len(edges.row), 5))
    by_row = torch.zeros(5, device=DEVICE, dtype=wide).index_add_(0, edges.row, by_edge)
    first = kind(nn.functional.linear(rows, weight), scaling, entropy=entropy, backward=False)
    lse = first.log_sum_exp()
    logprobs = first.logprobs(lse, edges)
    entropies = first.entropies(lse) if entropy else None
    second = kind(nn.functional.linear(rows, weight), scaling, entropy=entropy, backward=True)
    of_entropies = () if entropies is None else (entropies, by_entropy)
    grad = second.gradient(lse, edges, ChunkGradients(by_edge, by_row, *of_entropies))
    # The truth, of the logits as their dtype has them.
    raw = nn.functional.linear(rows, weight).double().requires_grad_()
    z = scaling.logit_map(raw) / scaling.temperature
    log_p = z.log_softmax(-1)
    h = -(log_p.exp() * log_p).sum(-1)
    loss = (log_p[edges] * by_edge.double()).sum()
    if entropy:
        loss = loss + (h * by_entropy.double()).sum()
    loss.backward()
    expected = z.logsumexp(-1), log_p[edges], h if entropy else None, raw.grad
    return (sum(lse), logprobs, entropies, grad), expected


def check_chunk(kind, dtype, scaling, vocabulary, *, entropy) -> None:
    got, expected = chunk_of(kind, dtype, scaling, vocabulary, entropy=entropy)
    narrow = torch.finfo(dtype).eps
    for name, bound, a, b in zip(
        ("lse", "logprobs", "entropy", "gradient"), (2e-6, 2e-6, 2e-5, 2 * narrow), got, expected
    ):
        if b is None:
            continue
        assert a.shape == b.shape and torch.isfinite(a).all(), name
        error = float((a.detach().double() - b.detach()).norm() / b.detach().norm())
        assert error <= max(bound, 2e-6), f"{name}: {error}"


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("scaling", list(SCALINGS.values()), ids=list(SCALINGS))
def test_the_softmax_of_a_chunk_by_pytorch_is_exact(scaling, entropy):
    check_chunk(PlainChunk, torch.float32, scaling, 37, entropy=entropy)
    check_chunk(PlainChunk, torch.float64, scaling, 37, entropy=entropy)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("certainty", [3.0, 12.0, 25.0])
def test_a_token_that_is_all_but_certain_keeps_its_digits(certainty, entropy):
    """Also where it shares the highest logit, or is not the predicted token."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 50, generator=generator) + 40
    logits[:3, 7] = logits.max() + certainty
    logits[1, 9] = logits[1, 7]
    edges = EdgesOfChunk(torch.tensor([0, 1, 1, 2, 3]), torch.tensor([7, 7, 9, 8, 7]))
    by_edge = torch.tensor([1.0, 1.0, 2.0, 1.0, 1.0])
    by_row = torch.zeros(4).index_add_(0, edges.row, by_edge)
    found = []
    for dtype in (torch.float32, torch.float64):
        chunk = PlainChunk(logits.to(dtype, copy=True), Scaling(), entropy=entropy, backward=True)
        lse = chunk.log_sum_exp()
        logprobs, entropies = chunk.logprobs(lse, edges), chunk.entropies(lse)
        of_entropies = (entropies, torch.ones(4, dtype=dtype)) if entropy else ()
        gradients = ChunkGradients(by_edge.to(dtype), by_row.to(dtype), *of_entropies)
        grad = chunk.gradient(lse, edges, gradients)
        found.append((logprobs, entropies, grad[0], grad[1], grad[2], grad[3]))
    exact = logits.double().requires_grad_()
    log_p = exact.log_softmax(-1)
    h = -(log_p.exp() * log_p).sum(-1)
    loss = (log_p[edges] * by_edge).sum() + (h.sum() if entropy else 0.0)
    loss.backward()
    torch.testing.assert_close(found[1][0], log_p[edges].detach())
    for single, double in zip(*found):
        assert relative_error(single, double) <= 1e-6
    for row, truth in enumerate(exact.grad):
        assert relative_error(found[1][2 + row], truth) <= 1e-9 * (1 + 2.7**certainty)  # autograd's own 1 - p


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_few_rows_of_a_large_vocabulary_have_the_rounding_error_of_many(count):
    torch.manual_seed(0)
    head, hidden = nn.Linear(16, 50_000, bias=False), torch.randn(count, 16)
    with torch.no_grad():
        head.weight.add_(0.1)
    targets, rows = torch.arange(count), torch.arange(count)
    found = []
    for dtype in (torch.float32, torch.float64):
        own, given = head.to(dtype), hidden.detach().to(dtype, copy=True).requires_grad_()
        edges = Edges(rows=rows, edge_row=rows, targets=targets)
        request = ScoreRequest(coefficients=torch.ones(count))
        scores = score_edges(given, own, own, edges, request, fused=True, vocab_size=50_000)
        scores.linear_loss.backward()
        found.append(given.grad)
    assert relative_error(*found) <= 3e-6


def triton_chunk():
    """The kernels' chunk; the test is skipped where they cannot run."""
    triton_or_skip()
    from treetrain.kernels.lm_head import TritonChunk

    return TritonChunk


@pytest.mark.parametrize("vocabulary", [37, 64, 300])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaling", list(SCALINGS.values()), ids=list(SCALINGS))
def test_the_softmax_of_a_chunk_by_triton_is_exact(monkeypatch, scaling, dtype, entropy, vocabulary):
    kind = triton_chunk()
    from treetrain.kernels import lm_head_kernels

    monkeypatch.setattr(lm_head_kernels, "BLOCK", 64)  # several blocks, the last one not full
    # The interpreter truncates where a GPU rounds to 16 bits.
    check_chunk(kind, dtype, scaling, vocabulary, entropy=entropy)


def test_a_logit_that_is_minus_infinity_has_no_share_and_no_gradient():
    triton_chunk()
    from treetrain.kernels.lm_head_kernels import statistics, to_gradient_

    logits = torch.tensor([[float("-inf"), 0.5, -1.0, float("-inf")]], device=DEVICE)
    expected = logits[:, 1:3].double()
    *lse, entropies = statistics(logits, 2.0, entropy=True)
    p = (2 * expected).softmax(-1)
    torch.testing.assert_close(sum(lse).double(), (2 * expected).logsumexp(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(entropies.double(), -(p * p.log()).sum(-1), rtol=1e-6, atol=0)
    edges = EdgesOfChunk(*torch.tensor([[0], [1]], device=DEVICE))
    ones = torch.ones(1, device=DEVICE)
    to_gradient_(logits, 2.0, lse, edges, ones, ones, entropies, ones)
    by_entropy = -p * (p.log() + entropies.double())
    truth = 2 * (torch.tensor([[1.0, 0.0]], device=DEVICE) - p + by_entropy)
    torch.testing.assert_close(logits[:, 1:3].double(), truth, rtol=1e-5, atol=1e-7)
    assert logits[0, 0] == 0 and logits[0, 3] == 0


LOSSES = {"sft": tt.losses.sft(), "ppo with entropy": tt.losses.ppo(entropy=0.1)}


@pytest.mark.parametrize("loss", list(LOSSES.values()), ids=list(LOSSES))
@pytest.mark.parametrize("budget", [None, 6])
def test_whole_steps_by_triton_are_those_by_pytorch(monkeypatch, loss, budget):
    triton_chunk()
    trunk = [3, 1, 4, 1, 5]
    ids = [[*trunk, 9, 2], [*trunk, 9, 2, 6], [*trunk, 8], [7, 7], trunk[:3]]
    rows = [tt.Trajectory(x, advantages=k - 1.5, old_logprobs=[-3.0] * len(x)) for k, x in enumerate(ids)]
    model = make_model("qwen3").to(DEVICE)
    found = []
    for kernels in ("torch", "triton"):
        monkeypatch.setenv("TREETRAIN_HEAD", kernels)
        model.zero_grad()
        result = tt.TreeEngine(model, budget=budget, temperature=0.8).forward_backward(rows, loss)
        found.append((result.loss, gradients(model)))
    (plain, gradient), (got, other) = found
    assert got == pytest.approx(plain, rel=1e-5)
    assert 0 < relative_error(other, gradient) <= 1e-5  # not the same bits: the kernels ran


def test_the_memory_of_a_chunk_by_triton_is_that_of_its_logits(monkeypatch):
    triton_chunk()
    model = make_model("qwen3").to(DEVICE)
    found = []
    for kernels in ("torch", "triton"):
        monkeypatch.setenv("TREETRAIN_HEAD", kernels)
        found.append(cost_of(model).counts.logit)
    assert found == [8, 4]


@pytest.mark.parametrize(
    ("dtype", "bias", "scaling"),
    [
        (torch.float64, None, Scaling()),
        (torch.float32, torch.zeros(3), Scaling()),
        (torch.float32, None, Scaling(LogitMap(cap=30.0))),
        (torch.float32, None, Scaling(LogitMap(factor=-1.0))),
    ],
    ids=["float64", "a bias", "a cap", "a negative factor"],
)
def test_what_the_kernels_lack_is_done_by_pytorch(monkeypatch, dtype, bias, scaling):
    kind = triton_chunk()
    monkeypatch.setenv("TREETRAIN_HEAD", "triton")
    assert chunk_type(dtype, DEVICE, bias, scaling) is PlainChunk
    assert chunk_type(torch.bfloat16, DEVICE, None, Scaling()) is kind


def test_triton_is_the_default_on_a_gpu_where_it_is_installed(monkeypatch):
    monkeypatch.delenv("TREETRAIN_HEAD", raising=False)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for installed, expected in ((None, PlainChunk), (object(), TritonChunk)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, installed=installed: installed)
        assert chunk_type(torch.bfloat16, cuda, None, Scaling()) is expected
        assert chunk_type(torch.bfloat16, cpu, None, Scaling()) is PlainChunk
    monkeypatch.setenv("TREETRAIN_HEAD", "torch")
    assert chunk_type(torch.bfloat16, cuda, None, Scaling()) is PlainChunk


def test_pytorch_adds_a_16_bit_product_to_a_float32_total_without_rounding_it_first():
    """On the meta device: the operation's name and arguments. It runs on a GPU only."""
    total = torch.zeros(4, 5, device="meta")
    left, right = (torch.zeros(shape, dtype=torch.bfloat16, device="meta") for shape in ((3, 4), (3, 5)))
    if torch.__version__ >= "2.13":  # before, meta lacks it
        assert torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total).dtype == torch.float32


def test_a_name_that_there_is_none_of_is_refused(monkeypatch):
    monkeypatch.setenv("TREETRAIN_HEAD", "cuda")
    with pytest.raises(ValueError, match="TREETRAIN_HEAD=cuda: no kernels have that name; there are torch, triton"):
        chunk_type(torch.float32, torch.device("cpu"), None, Scaling())


def test_kernels_that_cannot_run_here_are_refused(monkeypatch):
    monkeypatch.setenv("TREETRAIN_HEAD", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"TREETRAIN_HEAD=triton cannot run here: Triton .*; unset it, or name torch"):
        chunk_type(torch.float32, torch.device("cpu"), None, Scaling())


def test_they_compile_for_hopper():
    pytest.importorskip("triton", reason="Triton is not installed: nothing can be compiled")
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "benchmarks" / "triton_report.py"), "--kernels", "head"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 8 and all(" 0 bytes spilled" in line for line in lines), done.stdout


# ---- the check before the first use


class AsTriton(PlainChunk):
    """Serves as the kernels of a GPU."""


class WrongGradient(PlainChunk):
    def gradient(self, lse, edges, slopes):
        return super().gradient(lse, edges, slopes) * 1.1


class DoesNotCompile(PlainChunk):
    def log_sum_exp(self):
        raise RuntimeError("ptxas: unsupported architecture")


@pytest.mark.parametrize(
    ("kernels", "reason"),
    [(AsTriton, None), (WrongGradient, "off in the gradient of logits by 1.0e-01"), (DoesNotCompile, "ptxas")],
)
def test_kernels_that_are_wrong_here_leave_their_work_to_pytorch(kernels, reason, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(kernel_checks, "_FAILURES", {})
    monkeypatch.setattr(head_kernels, "CHECKED", {"cpu"})
    monkeypatch.setattr(head_kernels, "TritonChunk", kernels)
    monkeypatch.delenv(head_kernels.ENVIRONMENT, raising=False)
    if reason is None:
        assert head_kernels.self_checked(kernels, torch.bfloat16, cpu) is kernels
        return
    with pytest.warns(RuntimeWarning, match=f"head's Triton kernel.*{reason}"):
        assert head_kernels.self_checked(kernels, torch.float32, cpu) is PlainChunk
    assert head_kernels.self_checked(kernels, torch.float32, cpu) is PlainChunk, "checked once"
    monkeypatch.setenv(head_kernels.ENVIRONMENT, "triton")
    with pytest.raises(RuntimeError, match=f"{reason}.*name torch"):
        head_kernels.self_checked(kernels, torch.float32, cpu)


def adds_in_float32(total, left, right, *, out_dtype, out):
    """`torch.addmm` with `out_dtype` as a GPU computes it; PyTorch has it on no CPU."""
    return out.copy_(total + left.to(out_dtype) @ right.to(out_dtype))


def rounds_the_product(total, left, right, *, out_dtype, out):
    return out.copy_(total + left @ right)


def overflows(total, left, right, *, out_dtype, out):
    """As if the product of large gradients were made in float16."""
    return out.copy_(total + (left.to(out_dtype) @ right.to(out_dtype)).clamp(-65504, 65504))


def is_not_there(total, left, right, *, out_dtype, out):
    raise NotImplementedError("no kernel for out_dtype")


@pytest.mark.parametrize(
    ("addmm", "reason"),
    [
        (adds_in_float32, None),
        (rounds_the_product, "off in the sum by"),
        (overflows, "off in the sum of large gradients"),
        (is_not_there, "no kernel for out_dtype"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_the_product_that_adds_in_float32_is_checked_and_a_rounded_product_takes_its_place(monkeypatch, addmm, reason):
    cpu, asked = torch.device("cpu"), (torch.bfloat16, torch.float32)
    monkeypatch.setattr(kernel_checks, "_FAILURES", {})
    monkeypatch.setattr(head_kernels, "CHECKED", {"cpu"})
    monkeypatch.setattr(torch, "addmm", addmm)
    if reason is None:
        assert head_kernels._adds_unrounded(*asked, cpu)
        return
    with pytest.warns(RuntimeWarning, match=f"addmm with out_dtype.*{reason}"):
        assert not head_kernels._adds_unrounded(*asked, cpu)
    total, left = torch.ones(4, 5), torch.eye(4, 3, dtype=torch.bfloat16)
    PLAIN.add_product(total, left, torch.ones(3, 5, dtype=torch.bfloat16))
    assert total.sum() == 4 * 5 + 3 * 5


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_triton_is_exact_on_the_logits_of_its_check(dtype, most, monkeypatch):
    monkeypatch.setattr(head_kernels, "TritonChunk", triton_chunk())
    for name, logits in head_kernels._logits_of_check().items():
        found = head_kernels._errors_of_kernels(name, logits.to(DEVICE, dtype))
        assert max(found.values()) <= most, found
