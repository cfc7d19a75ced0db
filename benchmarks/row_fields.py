"""Steps whose rows carry what a sampler or a teacher recorded: as a tree, without one, and without these fields.

Run: python benchmarks/row_fields.py [field ...] [--repeats 5] [--dry-run]. Fifteen minutes on two quiet cores.

Forward and backward on sampled answers, of which none extends another (those that count once: search trees), on 30M
parameters in float32; experts on the mixture of families.py. "rows" packs every row by itself, with the same fields
and loss. "without" is the tree with the same loss without the field, or with supervised fine-tuning where a teacher is
the loss; of two adapters, all rows with one. All take turns in one process; medians over the rounds, and the least and
greatest ratio of a round. The error is the difference between the gradients of tree and rows, both in float32. Rows are
appended to results/row_fields.csv; a field that has its row at this commit is left out.
"""

import functools
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import families
import rivals
import rows as result_rows
import treetrain as tt
from treetrain.check.linear_engine import LinearEngine
from treetrain.logs.once import count_once
from treetrain.models.work import cheapest_rows
from workloads import VOCAB, load_workload, model_30m

IDS = 8
Rows = Sequence[tt.Trajectory]
Run = Callable[[Any, Rows], object]
POLICY = tt.losses.grpo(clip_low=0.2, clip_high=0.28)


class Step(NamedTuple):
    """What is timed."""

    model: nn.Module
    rows: Rows
    run: Run
    """Called with an engine and rows: adds a step's gradients."""
    plain_rows: Rows
    plain_run: Run
    """The same without the field."""


def trained_by(loss: Any) -> Run:
    return lambda engine, rows: engine.forward_backward(rows, loss)


def answers() -> list[tt.Trajectory]:
    """Sampled answers that no other extends, each with an advantage and the log-probabilities of an old policy."""
    rng = np.random.default_rng(0)
    return [
        row.replace(advantages=np.full(len(row), rng.normal()), old_logprobs=rng.normal(-np.log(VOCAB), 0.1, len(row)))
        for row in cheapest_rows(tt.build_tree(load_workload("sampled answers")))
    ]


def at_tokens(rows: Rows, make: Callable[[np.random.Generator, int], Any]) -> list[list[Any]]:
    """What `make(rng, id)` gives for every token of the tree, as a list for each row; at a shared token it is one."""
    tree, rng = tt.build_tree(rows), np.random.default_rng(1)
    made = [make(rng, id) for id in tree.tokens.tolist()]
    return [[made[token] for token in tree.path(number)] for number in range(len(rows))]


def kept_ids(rng: np.random.Generator, id: int) -> list[int]:
    """The ids that a sampler kept, with the sampled one: as recorded sets are, 2 in the middle, 8 in the mean."""
    count = int(np.clip(rng.lognormal(np.log(2), 1.7), 1, 512))
    return list({id, *rng.integers(VOCAB, size=count - 1).tolist()})


def masks() -> Step:
    plain = answers()
    kept = at_tokens(plain, kept_ids)
    rows = [row.replace(sampling_mask=[None, *sets[1:]]) for row, sets in zip(plain, kept)]
    return Step(model_30m(), rows, trained_by(POLICY), plain, trained_by(POLICY))


def corrected() -> Step:
    plain, rng = answers(), np.random.default_rng(2)
    rows = [row.replace(rollout_logprobs=row.old_logprobs + rng.normal(0, 0.05, len(row))) for row in plain]
    loss = tt.losses.grpo(clip_low=0.2, clip_high=0.28, importance_cap=2.0, importance_mode="sequence_truncate")
    return Step(model_30m(), rows, trained_by(loss), plain, trained_by(POLICY))


def recorded_teacher() -> Step:
    plain = answers()

    def most_likely(rng: np.random.Generator, _: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.choice(VOCAB, IDS, replace=False), np.log(rng.dirichlet(np.ones(IDS + 1))[1:])

    found = at_tokens(plain, most_likely)
    rows = [row.replace(teacher_topk=tuple(map(np.stack, zip(*of_row)))) for row, of_row in zip(plain, found)]
    return Step(model_30m(), rows, trained_by(tt.losses.distill_topk()), plain, trained_by(tt.losses.sft()))


def teacher_model() -> Step:
    rows, teacher = answers(), model_30m(seed=1).requires_grad_(False)

    @functools.cache
    def of_kind(kind: Any, budget: int | None) -> Any:
        return kind(teacher, **({"pack_tokens": budget} if kind is LinearEngine else {"budget": budget}))

    def run(engine: Any, given: Rows) -> object:
        return engine.distill(given, of_kind(type(engine), engine.budget))

    return Step(model_30m(), rows, run, rows, trained_by(tt.losses.sft()))


def experts() -> Step:
    model, plain = families.qwen3_moe(), answers()
    config: Any = model.config

    def chosen(rng: np.random.Generator, _: int) -> np.ndarray:
        scores = rng.random((config.num_hidden_layers, config.num_experts))
        return scores.argsort(-1)[:, : config.num_experts_per_tok]

    rows = [row.replace(experts=np.stack(of_row)) for row, of_row in zip(plain, at_tokens(plain, chosen))]
    return Step(model, rows, trained_by(POLICY), plain, trained_by(POLICY))


def adapters() -> Step:
    from peft import LoraConfig, get_peft_model

    rows = answers()
    lora = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model: Any = get_peft_model(model_30m(), lora, adapter_name="first")
    model.add_adapter("second", lora)
    model.set_requires_grad(["first", "second"], True)
    tree = tt.build_tree(rows)
    roots = [int(tree.path(number)[0]) for number in range(len(rows))]
    named = {row.id: ("first", "second")[root != roots[0]] for row, root in zip(rows, roots)}  # one for each prompt

    def run(engine: Any, given: Rows) -> object:
        return engine.forward_backward(given, POLICY, adapter_names=[named[row.id] for row in given])

    def one_adapter(engine: Any, given: Rows) -> object:
        return engine.forward_backward(given, POLICY, adapter_names=["first"] * len(given))

    return Step(model, rows, run, rows, one_adapter)


def once() -> Step:
    plain = cheapest_rows(tt.build_tree(load_workload("search trees")))
    sft = trained_by(tt.losses.sft())
    return Step(model_30m(), count_once(plain), sft, plain, sft)


FIELDS: dict[str, Callable[[], Step]] = {
    "kept ids of a sampler": masks,
    "its log-probabilities, ratios of rows": corrected,
    f"{IDS} ids of a teacher": recorded_teacher,
    "a teacher over the vocabulary": teacher_model,
    "experts that a sampler chose": experts,
    "two adapters": adapters,
    "each sampled token once": once,
}


class Way(rivals.Rival):
    """One engine with one of the step's two runs."""

    def __init__(self, engine: Any, rows: Rows, run: Run):
        self.model, self._engine, self._rows, self._run = engine.model, engine, rows, run

    def step(self) -> None:
        self._run(self._engine, self._rows)


def measure(field: str, repeats: int, dry_run: bool) -> None:
    """Time one field in this process and append its row."""
    if not dry_run and result_rows.has("row_fields", field=field):
        return print(f"{field}: has its row at this commit")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    result_rows.keep_memory()
    torch.manual_seed(0)
    step = FIELDS[field]()
    model = step.model
    linear = LinearEngine(model, pack_tokens=rivals.PACKED, check=False)
    tree = tt.TreeEngine(model, check=False)
    ways = {
        "rows": Way(linear, step.rows, step.run),
        "tree": Way(tree, step.rows, step.run),
        "without": Way(tree, step.plain_rows, step.plain_run),
    }
    rivals.take_turns(ways, 1)  # warms up
    gradients = []
    for name in ("rows", "tree"):
        model.zero_grad(set_to_none=False)
        ways[name].step()
        gradients.append(rivals.gradients(model))
    seconds = rivals.take_turns(ways, repeats)
    counts = rivals.sizes(model, step.rows)
    added = [with_it / alone for with_it, alone in zip(seconds["tree"], seconds["without"])]
    speed = rivals.speed(seconds["rows"], seconds["tree"])
    row = {
        "field": field,
        **{name: counts[name] for name in ("rows", "flat_tokens", "unique_tokens", "each_row_ideal")},
        "rows_seconds": f"{statistics.median(seconds['rows']):.3f}",
        **speed,
        "efficiency": f"{float(speed['speedup']) / float(counts['each_row_ideal']):.3f}",
        "without_seconds": f"{statistics.median(seconds['without']):.3f}",
        "times": f"{statistics.median(added):.3f}",
        "times_min": f"{min(added):.3f}",
        "times_max": f"{max(added):.3f}",
        "gradient_error": f"{float((gradients[1] - gradients[0]).norm() / gradients[0].norm()):.1e}",
    }
    result_rows.report("row_fields", row, dry_run=dry_run)


if __name__ == "__main__":
    result_rows.run_each(FIELDS, measure, __doc__, repeats=result_rows.count(5), dry_run=result_rows.DRY_RUN)
