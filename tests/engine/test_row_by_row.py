"""Whether sharing pays: batches that share next to nothing run row by row if that is predicted to be faster."""

import numpy as np
import pytest

import treetrain as tt
from support.models import make_model
from treetrain.check import linear
from treetrain.core.engine.engine_model import Call
from treetrain.core.planning.partition import partition
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.layout import pack


def seconds(plan: Plan) -> float:
    prefills = int(plan.prefill.max(initial=-1)) + 1
    return 10.0 * plan.num_parts + 4.0 * prefills + plan.layout.num_tokens + plan.recomputed_tokens / 3


def rows_sharing(prefix: int, *, rows: int = 4, length: int = 30) -> list[tt.Trajectory]:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 37, prefix).tolist()
    return [
        tt.Trajectory([*shared, k, *rng.integers(0, 37, length - prefix - 1).tolist()], loss_weights=1.0)
        for k in range(rows)
    ]


@pytest.mark.parametrize(
    ("prefix", "budget", "is_faster"),
    [(1, 60, True), (4, 60, False), (20, 60, False), (1, 20, False), (1, 1000, False)],
    ids=["a token", "four tokens", "a long prefix", "rows that do not fit whole", "one part"],
)
def test_rows_run_one_by_one_if_a_shared_prefix_costs_more_than_it_saves(monkeypatch, prefix, budget, is_faster):
    class Cost:
        device, seconds = "cpu", staticmethod(seconds)

    monkeypatch.setattr(Call, "cost", Cost)
    tree = tt.build_tree(rows_sharing(prefix))
    plan = partition(pack(tree, tree.trained_edges()[0] > 0), budget, seconds)
    engine = tt.TreeEngine(make_model("qwen3"), budget=budget)
    rows, alone = engine._faster(engine.prepared.call(), tree, plan)
    assert (rows is not tree) == (alone is not plan) == is_faster
    if is_faster:
        assert rows.num_tokens == rows.num_flat_tokens and alone.num_parts == 2 and alone.peak_tokens <= 60


def test_rows_run_one_by_one_give_the_same_gradients(monkeypatch):
    model, rows = make_model("qwen3"), rows_sharing(1)
    monkeypatch.setattr(tt.TreeEngine, "_faster", lambda self, call, tree, plan: (tree, plan))
    shared = tt.TreeEngine(model, budget=60).forward_backward(rows, tt.losses.sft())
    expected = linear.gradients(model)
    model.zero_grad()
    monkeypatch.undo()
    result = tt.TreeEngine(model, budget=60).forward_backward(rows, tt.losses.sft())
    assert result.computed_tokens > shared.computed_tokens and result.parts <= shared.parts
    assert (result.flat_tokens, result.unique_tokens) == (shared.flat_tokens, shared.unique_tokens)
    assert result.loss == pytest.approx(shared.loss, rel=1e-6)
    assert linear.relative_error(linear.gradients(model), expected) <= 1e-5


def test_a_mask_still_says_what_is_computed_where_rows_would_run_one_by_one():
    model, rows = make_model("qwen3"), rows_sharing(1)
    mask = [np.arange(len(row) - 1) % 2 == 0 for row in rows]
    whole = tt.TreeEngine(model, budget=1000).forward_backward(rows, tt.losses.sft(), 1.0, mask=mask)
    parts = tt.TreeEngine(model, budget=60).forward_backward(rows, tt.losses.sft(), 1.0, mask=mask)
    assert whole.parts == 1 < parts.parts
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
