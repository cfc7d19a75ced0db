"""The rows in a page: read off its data as `--show` prints them, for any row, within the page's bytes, in a browser."""

import dataclasses
import json

import numpy as np
import pytest

from support.browser import look, needs_browser
from treetrain.core.tree.token_tree import build_tree
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.inspection.one_row import runs_of
from treetrain.logs.inspection.page import write_page
from treetrain.logs.inspection.page_rows import BYTES, page_rows
from treetrain.logs.inspection.report import Shape, inspect_rows
from treetrain.shapes import ModelShape

SHAPE = Shape(counts=ModelShape.named("qwen3-0.6b").counts(), name="qwen3-0.6b", assumed=False)


class Letters:
    """A tokenizer: token n is letter n."""

    def decode(self, ids):
        return "".join(chr(97 + token % 26) for token in ids)


def read_off(data, row):
    """(text, weight) of each run of a row."""
    pieces, at = [], data["last"][row]
    while at >= 0:
        pieces.append(at)
        at = at - data["above"][at] if data["above"][at] else -1
    assert len(pieces) == len(data["marks"][row])
    found = []
    for piece, mark in zip(pieces[::-1], data["marks"][row]):
        weight = data["weights"][ord(mark) - 48]
        text = found.pop()[0] if found and found[-1][1] == weight else ""
        found.append((text + data["text"][piece], weight))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_every_row_is_shown_as_it_is_trained_by_itself_though_rows_share_text(seed):
    drawn = np.random.default_rng(seed)
    rows = []
    for _ in range(60):  # a token may be trained in one row and context, or weighted, in another
        ids = drawn.integers(0, 2, drawn.integers(0, 9))
        rows.append(Trajectory(ids, loss_weights=drawn.choice([0, 0.5, 1], len(ids))))
    data = page_rows(build_tree(rows), Letters())
    assert data["number"] == list(range(1, 61)) and data["groups"] == []
    for number, row in enumerate(rows):
        assert read_off(data, number) == runs_of(row, Letters())
        assert data["trained"][number] == (row.weights != 0).sum()


def test_a_row_of_many_weights_shows_what_is_trained():
    row = Trajectory(range(40), loss_weights=[0] * 20 + [(1 + n) / 20 for n in range(20)])
    (context, trained) = read_off(page_rows(build_tree([row]), Letters()), 0)
    assert (len(context[0]), context[1]) == (20, 0) and (len(trained[0]), trained[1]) == (20, 1)


def test_every_group_has_rows_and_its_mean_reward_where_not_all_rows_fit():
    drawn = np.random.default_rng(0)
    rows = [
        Trajectory(drawn.integers(0, 26, 40), group=f"task {n % 50}", reward=n % 3, id=f"row {n}") for n in range(9000)
    ]
    data = page_rows(build_tree(rows), Letters())
    assert len(json.dumps(data)) <= BYTES * 1.3 and data["all"] == 9000 and 1000 < len(data["number"]) <= 3000
    assert {data["groups"][group][0] for group in data["group"]} == {f"task {n}" for n in range(50)}
    for name, count, mean in data["groups"]:
        rewards = [row.reward for row in rows if row.group == name]
        assert count == len(rewards) == 180 and mean == pytest.approx(np.mean(rewards), rel=1e-3)
    assert [data["id"][k] == f"row {number - 1}" for k, number in enumerate(data["number"])]


def test_long_texts_are_shortened_those_of_context_first():
    drawn = np.random.default_rng(0)
    rows = []
    for _ in range(100):
        ids = drawn.integers(0, 26, 8000)
        rows.append(Trajectory(ids, loss_weights=[0] * 7000 + [1] * 1000))
    data = page_rows(build_tree(rows), Letters())
    assert len(data["number"]) == 100
    (context, _), (trained, _) = read_off(data, 7)
    assert " … " in context and trained == Letters().decode(rows[7].ids[7000:].tolist())


USE = """
const text = id => document.getElementById(id).textContent
const marked = () => [...document.querySelectorAll("#text mark")].map(m => m.textContent).join()
const buttons = () => [...document.querySelectorAll("#groups button")]
const box = document.getElementById("rows").getBoundingClientRect()
const found = { first: text("text"), marked: marked(), facts: text("facts"), said: text("said") }
found.groups = buttons().length; found.top = box.top
document.getElementById("after").click(); found.second = text("facts")
document.getElementById("filter").value = "task 2"; document.getElementById("filter").oninput()
found.filtered = buttons().map(b => b.title)
buttons()[1].click(); found.chosen = text("facts"); document.getElementById("after").click(); found.mate = text("facts")
const number = document.getElementById("number"); number.value = 1; number.onchange(); found.typed = text("facts")
number.value = 999; number.onchange(); found.absent = text("facts")
return { ...found, width: document.documentElement.scrollWidth }
"""


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [1240, 390])
def test_a_row_is_on_the_first_screen_and_groups_choose_rows_on_a_desk_and_on_a_phone_of_long_names(tmp_path, width):
    long = "a_key_name_without_any_break_" * 12
    rows = [
        Trajectory(
            [0] * 40 + [1 + n] * 20,
            loss_weights=[0] * 40 + [1] * 20,
            reward=n % 2,
            group=f"task {n // 4}",
            id=f"{long}{n}",
        )
        for n in range(12)
    ]
    inspection = dataclasses.replace(
        inspect_rows(rows, SHAPE, tokenizer=Letters()),
        files=("rows.jsonl",),
        notes=(f"keys that are not used: {long}",),
        remarks=[(f"key that is not used: {long}",)] * 12,
    )
    found = look(write_page(inspection, tmp_path / "page.html"), USE, width=width)
    assert found["errors"] == [] and found["width"] <= width
    assert found["top"] < 500 and found["first"] == "a" * 40 + "b" * 20 and found["marked"] == "b" * 20
    assert "reward 0" in found["facts"] and "60 tokens, 20 trained" in found["facts"] and long in found["said"]
    assert found["groups"] == 4 and found["filtered"] == ["all groups: 12 rows", "task 2: 4 rows, mean reward 0.5"]
    assert "reward 1" in found["second"] and "group task 0" in found["second"]
    assert "group task 2" in found["chosen"] and "group task 2" in found["mate"] and "reward 1" in found["mate"]
    assert (
        "group task 0" in found["typed"] and "row 999 is not in this page, which has 12 of 12 rows" in found["absent"]
    )
