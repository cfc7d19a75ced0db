"""Whether sharing pays: batches that share next to nothing run row by row where that is predicted to be faster."""

import numpy as np
import pytest

import treetrain as tt
from support import linear
from support.models import make_model
from treetrain.engine.sharing import rows_if_faster
from treetrain.planning.partition import partition
from treetrain.planning.plan import Plan
from treetrain.tree.layout import pack


def seconds(plan: Plan) -> float:
    publishing = plan.num_prefills
    return 10.0 * plan.num_parts + 4.0 * publishing + plan.layout.num_tokens + plan.recomputed_tokens / 3


def rows_sharing(prefix: int, *, rows: int = 4, length: int = 30) -> list[tt.Trajectory]:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 37, prefix).tolist()
    return [
        tt.Trajectory([*shared, k, *rng.integers(0, 37, length - prefix - 1).tolist()], loss_weights=1.0)
        for k in range(rows)
    ]


def found(rows: list[tt.Trajectory], budget: int):
    tree = tt.build_tree(rows)
    plan = partition(pack(tree, tree.trained_edges()[0] > 0), budget, seconds)
    return rows_if_faster(tree, plan, budget, seconds)


def test_one_shared_token_that_costs_a_pass_is_not_worth_it():
    alone = found(rows_sharing(1), 60)
    assert alone is not None
    tree, plan = alone
    assert tree.num_tokens == tree.num_flat_tokens and plan.num_parts == 2 and plan.peak_tokens <= 60


@pytest.mark.parametrize("prefix", [4, 20])
def test_a_prefix_that_saves_more_than_its_pass_is_shared(prefix):
    assert found(rows_sharing(prefix), 60) is None


def test_rows_that_do_not_fit_the_budget_whole_are_not_run_row_by_row():
    assert found(rows_sharing(1), 20) is None


def test_a_batch_in_one_part_always_shares():
    assert found(rows_sharing(1), 1000) is None


def test_the_engine_takes_rows_where_they_are_faster_and_gives_the_same_gradients(monkeypatch):
    from treetrain.engine import engine as module

    model = make_model("qwen3")
    rows = rows_sharing(1)
    monkeypatch.setattr(module, "rows_if_faster", lambda *_: None)
    shared = tt.TreeEngine(model, budget=60).forward_backward(rows, tt.losses.sft())
    expected = linear.gradients(model)
    model.zero_grad()
    monkeypatch.undo()
    result = tt.TreeEngine(model, budget=60).forward_backward(rows, tt.losses.sft())
    assert result.computed_tokens > shared.computed_tokens and result.parts <= shared.parts
    assert (result.flat_tokens, result.unique_tokens) == (shared.flat_tokens, shared.unique_tokens)
    assert result.loss == pytest.approx(shared.loss, rel=1e-6)
    assert linear.relative_error(linear.gradients(model), expected) <= 1e-5
