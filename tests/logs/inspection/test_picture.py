"""The picture of a tree: every row can be read off it, folding keeps its area, and a browser shows it."""

import dataclasses
import json
import re

import numpy as np
import pytest

from support.browser import look, needs_browser
from treetrain.core.tree.token_tree import build_tree
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.inspection.page import PAGE_BYTES, charts, write_page
from treetrain.logs.inspection.picture import KINDS, draw
from treetrain.logs.inspection.report import Shape, inspect_rows
from treetrain.shapes import ModelShape

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


def test_means_and_labels_are_those_of_the_rows_through_a_block() -> None:
    rows = some_rows(2, reward=lambda n: n / 7 if n % 3 else None, group=lambda n: n % 2)
    picture = draw(build_tree(rows), blocks=25)
    rewards = np.array([np.nan if row.reward is None else row.reward for row in rows])
    ids = picture.ids()
    for block, (mean, y, height) in enumerate(zip(picture.means(rewards), picture.y, picture.height)):
        own = [rows[number] for number in picture.row_at[y : y + height]]
        given = [row.reward for row in own if row.reward is not None]
        assert mean is None if not given else mean == pytest.approx(np.mean(given), rel=1e-3)
        assert ids[block] == ("" if picture.branches[block] else own[0].id)


@pytest.mark.parametrize("blocks", [10, 24_000])
def test_each_group_is_one_band_and_blocks_of_several_are_cut_into_pieces(blocks) -> None:
    rows = some_rows(4, group=lambda n: f"task {n % 3}")
    tree = build_tree(rows)
    picture = draw(tree, blocks=blocks)
    bands = picture.bands()
    assert sorted(name for name, _ in bands) == ["task 0", "task 1", "task 2"]
    sizes = {name: sum(1 for row in rows if row.group == name and len(row)) for name, _ in bands}
    assert dict(bands) == sizes and sorted(picture.row_at.tolist()) == [k for k, row in enumerate(rows) if len(row)]
    assert (picture.width * picture.height).sum() == pytest.approx(tree.num_flat_tokens)
    inner = picture.parent >= 0
    above = picture.parent[inner]
    assert (above < np.flatnonzero(inner)).all()  # parents first, as the page reads them
    assert (picture.x[inner] == (picture.x + picture.width)[above]).all()
    assert (picture.y[inner] >= picture.y[above]).all()
    assert ((picture.y + picture.height)[inner] <= (picture.y + picture.height)[above]).all()
    if blocks > 1000:
        for place, number in enumerate(picture.row_at.tolist()):
            here = np.flatnonzero((picture.y <= place) & (place < picture.y + picture.height))
            here = here[np.argsort(picture.x[here])]
            path = [np.arange(picture.start[n], picture.start[n] + picture.unique[n]) for n in here]
            assert np.concatenate(path).tolist() == tree.path(number).tolist()
    assert draw(build_tree(some_rows(4))).bands() == []


def test_lost_sharing_is_marked_where_rows_part() -> None:
    shared, rows = list(range(200, 300)), []
    for number in range(8):
        ids = [*range(100, 120), 500 + number, *shared, 600 + number]
        rows.append(Trajectory(ids, loss_weights=[0] * 121 + [1], id=f"row {number}"))
    inspection = inspect_rows(rows, SHAPE)
    picture = draw(inspection.tree)
    (lost,) = inspection.diagnosis.causes
    forks = picture.forks(inspection.diagnosis)
    assert [(cause, token) for cause, token, _ in forks] == [(0, 20)] * 7 and lost.position == 20
    marked = {picture.row_at[place] for *_, place in forks}
    assert len(marked) == 7 and "differs from" in lost.example()


def test_the_terminal_s_lines_are_the_picture() -> None:
    weights = [0, 0, 0, 0, 1, 1, 1, 1]
    tree = build_tree([Trajectory([1, 1, 1, 1, tail, tail, tail, tail], loss_weights=weights) for tail in (2, 3, 3)])
    lines = ["".join(text for text, _ in line) for line in draw(tree).lines(8, 10)]
    assert sorted(lines) == ["▒▒▒▒████", "▒▒▒▒████", "▒▒▒▒▓▓▓▓"]


def test_the_charts_count_what_they_say() -> None:
    tree = build_tree([[1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6], [9]])
    lengths, depths, fans, shared = charts(tree)
    assert [chart["most"] for chart in (lengths, depths, fans, shared)] == [
        "trajectories: 2", "forks: 1", "forks: 2", "4 tokens"
    ]  # fmt: skip
    assert [words for *_, words in lengths["bars"]][-1] == "trajectories of 4 tokens: 2"
    assert [words.split()[-1] for *_, words in depths["bars"]] == ["1", "1"]
    assert [words for *_, words in fans["bars"]] == ["forks of 2 branches: 2"]
    assert shared["bars"][1][2] == "tokens 1 to 2: 3 in rows, 1 in the tree, 3.0×"
    for empty in charts(build_tree([[]])):
        assert empty["bars"] == []


@pytest.mark.slow
def test_the_page_is_one_small_file_that_no_text_breaks_out_of(tmp_path) -> None:
    evil = "</script><script>alert(1)</script>"
    rows = [Trajectory([*range(seed % 50), seed], id=evil, group=evil, reward=1.0) for seed in range(40_000)]
    tokenizer = type("T", (), {"decode": lambda self, ids: evil + "é☃" * len(ids)})()
    inspection = dataclasses.replace(inspect_rows(rows, SHAPE, tokenizer=tokenizer), files=(evil,), notes=(evil,))
    page = write_page(inspection, tmp_path / "a" / "b.html")
    text = page.read_text(encoding="utf-8")
    assert "Train as a tree: " in text and "Why there is not more sharing" in text
    assert page.stat().st_size < PAGE_BYTES and "alert(1)</script>" not in text and "folded into" in text
    assert "Tap a block" in text and "@media (pointer: coarse)" in text
    assert not re.findall(r'(?:src|href)="(?!data:,)', text) and "http" not in text.replace("www.w3.org", "")
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert data["rows"] == 40_000 and data["blocks"]["id"][0] == evil
    assert {len(data["blocks"][name]) for name in ("parent", "dy", "width", "height", "kind", "text")} == {
        len(data["blocks"]["id"])
    }


def test_a_tree_of_nothing_has_a_page_and_bare_ids_are_trained(tmp_path) -> None:
    empty = inspect_rows([Trajectory([])], SHAPE)
    assert "0 trajectories" in write_page(empty, tmp_path / "empty.html").read_text()
    assert KINDS[draw(build_tree([[1, 2, 3], [1, 2, 4]])).kind[0]] == "trained"


USE = """
const view = document.getElementById("view"), text = id => document.getElementById(id).textContent
const where = () => [at.x, at.y, at.w, at.h].join(" "), box = i => drawn.find(one => one.i === i)
const event = (kind, type, one, pointerType) => {
  const { left, top } = view.getBoundingClientRect()
  const clientX = left + one.l + one.w / 2, clientY = top + one.t + one.h / 2
  view.dispatchEvent(new type(kind, { bubbles: true, pointerType, clientX, clientY }))
}
const press = (...keys) => keys.forEach(key => view.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })))
const colour = name => {
  if (name) document.querySelector(`[value=${name}]`).click()
  const ratio = devicePixelRatio, b = box(1)
  return [...pen.getImageData((b.l + b.w - 8) * ratio, (b.t + b.h - 8) * ratio, 1, 1).data].join()
}
const found = { start: where() }
event("pointermove", PointerEvent, box(1), "mouse"); found.hover = text("about")
event("click", PointerEvent, box(1), "mouse"); found.zoomed = where(); found.crumbs = text("crumbs")
press("Escape", "Escape"); found.back = where()
chosen = -1
press("ArrowRight", "ArrowRight", "ArrowDown"); found.keys = text("about")
press("Enter"); found.entered = where()
press("Escape", "Escape")
chosen = -1; shown = null; draw()
event("click", PointerEvent, box(1), "touch"); found.tapped = where()
event("click", PointerEvent, box(1), "touch"); found.tapped_again = where()
press("Escape")
chosen = -1; draw()
found.fill = colour()
found.reward = colour("reward"); found.same = text("key")
return { ...found, width: document.documentElement.scrollWidth,
  back_colour: getComputedStyle(document.body).backgroundColor, tall: view.getBoundingClientRect().height }
"""


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1240, False), (390, True)])
def test_a_browser_hovers_taps_zooms_and_walks_by_keyboard_on_a_desk_and_on_a_dark_phone(tmp_path, width, dark) -> None:
    rows = [Trajectory([0] * 40 + [tail] * 20, reward=1.0, id=f"row {tail}") for tail in (1, 2)]
    inspection = inspect_rows(rows, SHAPE, tokenizer=Letters())
    page = write_page(inspection, tmp_path / "page.html")
    found = look(page, USE, width=width, dark=dark)
    assert found["errors"] == [] and found["width"] <= width and found["tall"] >= 300
    assert found["start"] == found["back"] == "0 0 60 2"
    assert "bbbb" in found["hover"] and "row 1" in found["hover"] and "trajectories1 of 2" in found["hover"]
    assert found["zoomed"] == "40 0 20 1" and found["crumbs"].startswith("all 2 trajectories › bbbb")
    assert "cccc" in found["keys"] and found["entered"] == "40 1 20 1"
    assert found["tapped"] == "0 0 60 2" and found["tapped_again"] == "40 0 20 1"
    assert found["fill"] != found["reward"]
    assert found["same"] == "reward 1 in all rows"
    assert found["back_colour"] == ("rgb(18, 22, 27)" if dark else "rgb(246, 247, 249)")


LOST = """
const view = document.getElementById("view"), text = id => document.getElementById(id).textContent
const click = one => {
  const { left, top } = view.getBoundingClientRect()
  const clientX = left + one.l + one.w / 2, clientY = top + one.t + one.h / 2
  view.dispatchEvent(new PointerEvent("click", { bubbles: true, pointerType: "mouse", clientX, clientY }))
}
const names = () => drawn.filter(one => one.band).map(one => one.band.name)
const found = { names: names(), label: drawn.find(one => one.band).band.short,
  marks: drawn.filter(one => one.mark).length }
found.orange = drawn.some(one => one.pool && one.pool.trained > 0 && one.w >= 2)
click(drawn.find(one => one.mark)); found.cause = text("about"); found.link = document.querySelector("#about a").hash
found.target = document.querySelector(found.link).textContent
const thin = drawn.find(one => one.pool); click(thin); found.opened = [at.h, names().length]
const again = drawn.find(one => one.pool || one.i > 0); click(again); found.deeper = at.h
return { ...found, width: document.documentElement.scrollWidth }
"""


@pytest.mark.slow
@needs_browser
def test_many_rows_are_bands_with_names_that_open_and_marks_that_lead_to_the_cause(tmp_path) -> None:
    rows, drawn = [], np.random.default_rng(0)
    system = drawn.integers(100, 5000, 200)
    for task in range(400):
        prompt = np.r_[system[:20], 9000 + task, system[20:], drawn.integers(100, 5000, 50)]
        for _ in range(8):
            ids = np.r_[prompt, drawn.integers(100, 5000, 30)]
            rows.append(Trajectory(ids, loss_weights=np.arange(len(ids)) >= len(prompt), group=f"task {task}"))
    page = write_page(inspect_rows(rows, SHAPE), tmp_path / "page.html")
    found = look(page, LOST, width=390)
    assert found["names"][0] == "task 0 and 20 more" and found["label"] == "task 0" and found["width"] <= 390
    assert 0 < found["marks"] <= 60 and found["link"] == "#cause-1" and "differs from" in found["cause"]
    assert found["target"].startswith("1. values that differ") and found["orange"]
    assert found["deeper"] < found["opened"][0] < 3200 and found["opened"][1] > 0
