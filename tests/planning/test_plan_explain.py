import json
import re

import numpy as np
import pytest

from support.plans import LinearPrices, layout_of
from treetrain.core.planning.partition import partition
from treetrain.shapes import make_plan


@pytest.fixture
def layout():
    rng = np.random.default_rng(5)
    trunk = rng.integers(0, 99, 300).tolist()
    return layout_of([[*trunk, leaf, *rng.integers(0, 99, 250).tolist()] for leaf in range(12)])


@pytest.mark.parametrize("budget", [None, 200, 700, "400kB", 10**6])
def test_numbers_say_what_the_plan_does(layout, budget):
    prices = LinearPrices()
    plan = make_plan(layout, prices, budget=budget)
    facts = plan.explanation()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["parts"] == plan.num_parts
    assert facts["kept_parts"] == plan.kept.sum() and facts["recomputed_parts"] == (plan.prefill >= 0).sum()
    assert facts["tokens"] == layout.num_tokens == 300 + 12 * 251
    assert facts["longest_path"] == 551
    assert facts["largest_part"] == plan.sizes.max()
    assert facts["recomputed_tokens"] == plan.recomputed_tokens
    assert facts["peak_tokens"] == plan.peak_tokens
    prefills = sum(event.kind == "prefill" for event in plan.events())
    assert facts["seconds"] == prices.seconds(plan) and facts["peak_bytes"] == prices.peak_bytes(plan)
    assert facts["seconds_recomputation"] == pytest.approx(0.35 * plan.recomputed_tokens)
    assert facts["seconds_fixed"] == pytest.approx(44 * plan.num_parts + 14 * prefills)


@pytest.mark.parametrize("budget", [None, 200, 700, "400kB", 10**6])
def test_the_table_is_of_plans_at_other_budgets_beside_this_one(layout, budget):
    prices = LinearPrices()
    plan = make_plan(layout, prices, budget=budget)
    facts = plan.explanation()
    rows, own = facts["budgets"], facts["budget_tokens"]
    assert [row["budget_tokens"] for row in rows if row["name"] == "this plan"] == [own]
    others = [row["budget_tokens"] for row in rows if row["name"] != "this plan"]
    bounded = [row["budget_tokens"] for row in rows if row["budget_tokens"] is not None]
    assert bounded == sorted(set(bounded)) and own not in others
    base = layout.num_tokens if own is None else own
    wanted = {-(-base // 4), base // 2, 2 * base, 4 * base, 551, layout.num_tokens}
    assert set(others) == {min(tokens, layout.num_tokens) for tokens in wanted} - {own}
    names = {row["budget_tokens"]: row["name"] for row in rows}
    assert names[551] == "longest path"
    assert own == layout.num_tokens or names[layout.num_tokens] == "whole tree"
    for row in rows:
        other = plan if row["name"] == "this plan" else partition(layout, row["budget_tokens"], prices.seconds)
        assert row["parts"] == other.num_parts and row["recomputed_tokens"] == other.recomputed_tokens
        assert row["seconds"] == prices.seconds(other) and row["peak_bytes"] == prices.peak_bytes(other)


@pytest.mark.parametrize("budget", [None, 200, 700, "400kB"])
def test_words_fit_a_hundred_columns_and_hold_the_numbers(layout, budget):
    plan = make_plan(layout, LinearPrices(), budget=budget)
    text, facts = plan.explain(), plan.explanation()
    assert max(map(len, text.splitlines())) <= 100
    named = {match[1]: match[2] for match in re.finditer(r"^(\w[\w ]*?)  +(.*)$", text, re.MULTILINE)}
    assert (
        named["budget"]
        == {
            None: "none given: no bound",
            200: "200 tokens alive at once",
            700: "700 tokens alive at once",
            "400kB": f"390.6 KiB: {facts['budget_tokens']} tokens alive at once",
        }[budget]
    )
    assert named["parts"].startswith(
        f"{plan.num_parts}: {int((~plan.is_inner).sum())} leaves, {facts['kept_parts']} kept"
    )
    assert f"{facts['recomputed_tokens']:,} tokens" in named["recomputed"]
    assert f"{facts['seconds']:.3g} s" in named["time of a step"]
    table = text.split("\n\n")[1].splitlines()
    assert len(table) == 1 + len(facts["budgets"])
    assert sum("this plan" in line for line in table) == 1


def test_plans_of_the_table_are_made_only_when_it_is_asked_for(layout):
    prices = LinearPrices()
    plan = make_plan(layout, prices, budget=10**6)
    before = prices.plans
    assert before == 0
    plan.explain()
    assert prices.plans > 5
