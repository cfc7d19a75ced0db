"""The picture of a tree: every row can be read off it, folding keeps its area, and a browser shows it."""

import dataclasses
import json
import re

import numpy as np
import pytest

from support.browser import look, needs_browser
from treetrain.data.trajectory import Trajectory
from treetrain.inspection.page import PAGE_BYTES, charts, parts, write_page
from treetrain.inspection.picture import KINDS, draw
from treetrain.inspection.report import Shape, inspect_rows
from treetrain.planning.cost import ModelShape
from treetrain.planning.make import make_plan
from treetrain.tree.build import build_tree
from treetrain.tree.nodes import Node
from treetrain.tree.token_tree import TokenTree

SHAPE = Shape(counts=ModelShape.named("qwen3-0.6b").counts(), name="qwen3-0.6b", assumed=False)


class Letters:
    """A tokenizer: token n is letter n."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + token % 26) for token in ids)


def some_rows(seed: int, count: int = 40, most: int = 9, **facts) -> list[Trajectory]:
    """Short rows over two tokens, some of them trained; many share, repeat or extend each other."""
    drawn = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        ids = drawn.integers(0, 2, drawn.integers(0, most))
        weights = (np.arange(len(ids)) >= 3).astype(float)
        made = {name: make(number) for name, make in facts.items()}
        rows.append(Trajectory(ids, loss_weights=weights, id=f"row {number}", **made))
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_every_row_can_be_read_off_the_picture(seed: int) -> None:
    tree = build_tree(some_rows(seed))
    picture = draw(tree)
    assert picture.rows == sum(1 for row in tree.trajectories if len(row)) == len(picture.row_at)
    assert picture.unique.sum() == tree.num_tokens and picture.folded() == ""
    trained = tree.trained_edges()[0] > 0
    for place, number in enumerate(picture.row_at.tolist()):
        here = np.flatnonzero((picture.y <= place) & (place < picture.y + picture.height))
        here = here[np.argsort(picture.x[here])]
        path = np.concatenate([np.arange(picture.start[n], picture.start[n] + picture.unique[n]) for n in here])
        assert path.tolist() == tree.path(number).tolist()
        assert picture.x[here].tolist() == np.append(0, np.cumsum(picture.width[here]))[:-1].tolist()
        assert picture.parent[here].tolist() == [-1, *here[:-1].tolist()]
        for block in here:
            tokens = range(picture.start[block], picture.start[block] + picture.unique[block])
            assert all(trained[token] == picture.kind[block] for token in tokens if tree.parent[token] >= 0)


@pytest.mark.parametrize("blocks", [1, 7, 20])
def test_folding_keeps_the_area_and_says_what_is_hidden(blocks: int) -> None:
    tree = build_tree(some_rows(5))
    whole, picture = draw(tree), draw(tree, blocks=blocks)
    folded = picture.branches > 0
    assert (~folded).sum() == blocks and picture.hidden.sum() == len(whole.x) - blocks
    assert (picture.width * picture.height).sum() == pytest.approx(tree.num_flat_tokens)
    assert picture.unique.sum() == tree.num_tokens
    assert (picture.trained * picture.width * picture.height).sum() == pytest.approx(
        (whole.kind * whole.width * whole.height).sum()
    )
    inner = picture.parent >= 0
    assert not folded[picture.parent[inner]].any()
    assert (picture.x[inner] == (picture.x + picture.width)[picture.parent[inner]]).all()
    assert f"{blocks:,} blocks" in picture.folded() and f"{picture.hidden.sum():,} smaller ones" in picture.folded()


def test_parts_of_a_plan_are_blocks_of_their_own() -> None:
    tree = build_tree([[1] * 30 + [2] * 20, [1] * 30 + [3] * 25, [1] * 12])
    plan = make_plan(tree, "qwen3-0.6b", budget=28)
    picture = draw(tree, plan=plan)
    part_of = np.full(tree.num_tokens, -1)
    part_of[plan.layout.tree_index] = plan.part_of
    for start, count, part in zip(picture.start, picture.unique, picture.part):
        assert (part_of[start : start + count] == part).all()
    assert (picture.part < 0).any()
    for (kind, tokens), kept, prefill, size in zip(parts(plan), plan.kept, plan.prefill, plan.sizes, strict=True):
        assert (kind == "kept", kind == "recomputed", tokens) == (kept, prefill >= 0, size)
    assert {"leaf", "recomputed"} <= {kind for kind, _ in parts(plan)}


def test_means_and_labels_are_those_of_the_rows_through_a_block() -> None:
    rows = some_rows(2, reward=lambda n: n / 7 if n % 3 else None, group=lambda n: n % 2)
    picture = draw(build_tree(rows), blocks=25)
    rewards = np.array([np.nan if row.reward is None else row.reward for row in rows])
    groups, ids = picture.labels()
    for block, (mean, y, height) in enumerate(zip(picture.means(rewards), picture.y, picture.height)):
        own = [rows[number] for number in picture.row_at[y : y + height]]
        given = [row.reward for row in own if row.reward is not None]
        assert mean is None if not given else mean == pytest.approx(np.mean(given), rel=1e-3)
        same = {row.group for row in own}
        assert groups[block] == (str(same.pop()) if len(same) == 1 else "") and ids[block] == own[0].id


def test_the_terminal_s_lines_are_the_picture() -> None:
    weights = [0, 0, 0, 0, 1, 1, 1, 1]
    tree = build_tree([Trajectory([1, 1, 1, 1, tail, tail, tail, tail], loss_weights=weights) for tail in (2, 3, 3)])
    lines = ["".join(text for text, _ in line) for line in draw(tree).lines(8, 10)]
    assert sorted(lines) == ["▒▒▒▒████", "▒▒▒▒████", "▒▒▒▒▓▓▓▓"]


def test_the_charts_count_what_they_say() -> None:
    tree = build_tree([[1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6], [9]])
    lengths, depths, fans, shared = charts(tree)
    assert [words for *_, words in lengths["bars"]][-1] == "2 trajectories of 4 tokens"
    assert [words.split()[0] for *_, words in depths["bars"]] == ["1", "1"]
    assert [words for *_, words in fans["bars"]] == ["2 forks of 2 branches"]
    assert shared["bars"][1][2] == "tokens 1 to 2: 3 in rows, 1 in the tree, 3.0×"
    for empty in charts(build_tree([[]])):
        assert empty["bars"] == []


def test_the_page_is_one_small_file_that_no_text_breaks_out_of(tmp_path) -> None:
    evil = "</script><script>alert(1)</script>"
    rows = [Trajectory([*range(seed % 50), seed], id=evil, group=evil, reward=1.0) for seed in range(9000)]
    tokenizer = type("T", (), {"decode": lambda self, ids: evil + "é☃" * len(ids)})()
    inspection = dataclasses.replace(inspect_rows(rows, SHAPE, tokenizer=tokenizer), files=(evil,), notes=(evil,))
    page = write_page(inspection, tmp_path / "a" / "b.html")
    text = page.read_text(encoding="utf-8")
    assert "Train as a tree: " in text and "Why there is not more sharing" in text
    assert page.stat().st_size < PAGE_BYTES and "alert(1)</script>" not in text and "folded into" in text
    assert not re.findall(r'(?:src|href)="(?!data:,)', text) and "http" not in text.replace("www.w3.org", "")
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert data["rows"] == 9000 and data["blocks"]["id"][0] == evil
    assert len(re.findall("<rect x=.*?class=.k", text)) == len(data["blocks"]["x"])


def test_a_tree_of_nothing_and_a_tree_of_nodes_have_a_page(tmp_path) -> None:
    empty = inspect_rows([Trajectory([])], SHAPE)
    assert "0 trajectories" in write_page(empty, tmp_path / "empty.html").read_text()
    nodes = TokenTree.from_nodes([Node(None, [1, 2]), Node(0, [3]), Node(0, [4])], [1, 2])
    assert KINDS[draw(nodes).kind[0]] == "trained"


USE = """
const view = document.getElementById("view"), svg = view.querySelector("svg"), rects = [...svg.querySelectorAll("rect")]
const box = () => svg.getAttribute("viewBox"), text = id => document.getElementById(id).textContent
const point = kind => rects[1].dispatchEvent(new PointerEvent(kind, { bubbles: true, pointerType: "mouse" }))
const press = (...keys) => keys.forEach(key => view.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })))
const colour = mode => { document.querySelector(`[value=${mode}]`).click(); return getComputedStyle(rects[1]).fill }
const found = { start: box() }
point("pointermove"); found.hover = text("about")
point("click"); found.zoomed = box(); found.crumbs = text("crumbs")
press("Escape", "Escape"); found.back = box()
press("ArrowLeft", "ArrowRight", "ArrowDown"); found.keys = text("about")
press("Enter"); found.entered = box()
press("Escape", "Escape")
found.fill = getComputedStyle(rects[1]).fill
found.reward = colour("reward"); found.plan = colour("plan"); found.key = text("key")
return { ...found, labels: text("marks"), width: document.documentElement.scrollWidth,
  back_colour: getComputedStyle(document.body).backgroundColor, tall: view.getBoundingClientRect().height }
"""


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1240, False), (360, True)])
def test_a_browser_hovers_zooms_and_walks_by_keyboard_on_a_desk_and_on_a_dark_phone(tmp_path, width, dark) -> None:
    rows = [Trajectory([0] * 40 + [tail] * 20, reward=float(tail), id=f"row {tail}") for tail in (1, 2)]
    inspection = inspect_rows(rows, SHAPE, tokenizer=Letters())
    plan = make_plan(inspection.tree, "qwen3-0.6b", budget=80)
    page = write_page(dataclasses.replace(inspection, plan=plan), tmp_path / "page.html")
    found = look(page, USE, width=width, dark=dark)
    assert found["errors"] == [] and found["width"] <= width and found["tall"] >= 300
    assert found["start"] == found["back"] == "0 0 60 2"
    assert "bbbb" in found["hover"] and "row 1" in found["hover"] and "trajectories1 of 2" in found["hover"]
    assert found["zoomed"] == "40 0 20 1" and found["crumbs"].startswith("all 2 trajectories › aaaa")
    assert "cccc" in found["keys"] and found["entered"] == "40 1 20 1"
    assert found["labels"].startswith("×2 aaaa")
    assert len({found["fill"], found["reward"], found["plan"]}) == 3 and "recomputed" in found["key"]
    assert found["back_colour"] == ("rgb(18, 22, 27)" if dark else "rgb(246, 247, 249)")
