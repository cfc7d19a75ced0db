"""Distillation over several processes has the loss and gradients of one process with all rows."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_steps import gradients, relative_error, rows_of, sharded, split_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import treetrain as tt
from support.models import make_model
from treetrain import distill
from treetrain.check.contract import PureFloat64

CASES = [
    ("group", "plain", "round", True),
    ("ddp", "fsdp", "first has all", False),
    ("fsdp", "plain", "last has all", True),
    ("fsdp head", "fsdp head", "round", False),
    ("fsdp", "fsdp", "round", False),
]


def made(name: str, seed: int, *, tied: bool) -> nn.Module:
    torch.manual_seed(seed)
    model = make_model(name, dtype=torch.float64, tie_word_embeddings=tied)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def divided(model: nn.Module, how: str, group: Any) -> nn.Module:
    if how.startswith("fsdp"):
        return sharded(model, group, head=how == "fsdp head")
    return DistributedDataParallel(model, process_group=group) if how == "ddp" else model


def steps(engine: Any, taught: Any, rows: list[tt.Trajectory]) -> list[tt.StepResult]:
    """A call that divides by the weights of all rows, and one more by a normaliser of its own."""
    return [engine.distill(rows, taught, "reverse"), engine.distill(rows[:3], taught, "jensen_shannon", 7.0)]


def on_rank(group: Any, student: str, teacher: str, split: str, tied: bool, states: int) -> dict[str, Any]:
    distill.head_chunk_rows = lambda _vocabulary, _device: states
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rows = rows_of(3, "sft")
    parts = [split_of(rows, number, size, split) for number in range(size)]
    model, other = made("qwen3", 1, tied=tied), made("llama", 2, tied=False)
    with PureFloat64():
        alone, taught = tt.TreeEngine(made("qwen3", 1, tied=tied), temperature=0.8), tt.TreeEngine(other)
        expected = [alone.distill(rows, taught, "reverse")]
        expected.append(alone.distill([row for own in parts for row in own[:3]], taught, "jensen_shannon", 7.0))
        topk = taught.teach(parts[rank], 3)
        options = {"group": group} if student == "group" else {}
        engine = tt.TreeEngine(divided(model, student, group), temperature=0.8, **options)
        taught = tt.TreeEngine(divided(other, teacher, group))
        found = steps(engine, taught, parts[rank])
        again = taught.teach(parts[rank], 3)
    of_ranks = {name.removeprefix("module."): grad for name, grad in gradients(model).items()}
    return {
        "gradients": relative_error(of_ranks, gradients(alone.model)),
        "losses": [abs(a.loss - b.loss) / abs(b.loss) for a, b in zip(found, expected)],
        "metrics": [a.metrics["divergence"] - b.metrics["divergence"] for a, b in zip(found, expected)],
        "counts": [a.flat_tokens - b.flat_tokens for a, b in zip(found, expected)],
        "teach": [
            a.teacher_topk.ids.tolist() == b.teacher_topk.ids.tolist()
            and torch.allclose(*(torch.as_tensor(x.teacher_topk.logprobs) for x in (a, b)), rtol=0, atol=1e-12)
            for a, b in zip(topk, again, strict=True)
        ],
        "teacher": [p.grad is None for p in other.parameters()],
    }


@pytest.mark.parametrize(("student", "teacher", "split", "tied"), CASES)
def test_ranks_distil_as_one_process(two, student, teacher, split, tied, record_property):
    for seen in two.run(on_rank, student, teacher, split, tied, 5, timeout=300):
        record_property("errors", {"float64": seen["gradients"]})
        assert seen["gradients"] <= 1e-12 and max(seen["losses"]) <= 1e-12, seen
        assert max(map(abs, seen["metrics"])) <= 1e-12 and seen["counts"] == [0, 0], seen
        assert all(seen["teach"]) and all(seen["teacher"]), seen


def refused(group: Any) -> list[str]:
    said = []
    rows = [[1, 2, 3], [1, 2, 4]]
    student, shards = made("qwen3", 1, tied=True), sharded(made("llama", 2, tied=False), group)
    hooked = made("llama", 2, tied=False)
    hooked.lm_head.register_forward_hook(lambda *_: None)
    rank = dist.get_rank(group)
    for engine, taught, options in (
        (tt.TreeEngine(student), tt.TreeEngine(shards), {}),
        (tt.TreeEngine(student, context=group), tt.TreeEngine(made("llama", 2, tied=False)), {}),
        (tt.TreeEngine(student, group=group), tt.TreeEngine(sharded(hooked, group)), {}),
        (tt.TreeEngine(student, group=group), tt.TreeEngine(shards), {"normaliser": 1.0 + rank}),
        (tt.TreeEngine(student, group=group), tt.TreeEngine(shards), {"rows": [[1], [10**6, 2]] if rank else rows}),
        (tt.TreeEngine(student, group=group), tt.TreeEngine(shards), {"rows": [[1]]}),
    ):
        try:
            engine.distill(options.pop("rows", rows), taught, **options)
            said.append("nothing")
        except (tt.UnsupportedModel, tt.DataError, RuntimeError) as error:
            said.append(str(error))
    assert all(p.grad is None for p in student.parameters())
    return said


def test_what_ranks_cannot_distil_stops_all_of_them_with_a_reason(two):
    for said in two.run(refused, timeout=300):
        for words, sentence in zip(
            (
                "the teacher is divided over 2 processes, and 1 share the student's steps",
                "tensor or context parallel or ZeRO-3 has not been verified",
                "the LM head is divided by FSDP2 and has forward hooks",
                "differ in a normaliser: rank 0 has 1.0, rank 1 2.0",
                "1000000",
                "the normaliser is 0",
            ),
            said,
            strict=True,
        ):
            assert words in sentence, said
