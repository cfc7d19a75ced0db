"""The page of a run beside its linear twin: right numbers, nothing loaded, readable everywhere."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support.browser import look, needs_browser
from treetrain.core.errors import DataError
from treetrain.trainers.run_page import COLOURS, compare_runs, read_run, write_page, write_picture


def write_state(folder: Path, *, linear: bool = False, steps: int = 8, **changes) -> Path:
    """The state of a Trainer that has logged plausible numbers."""
    logs: list[dict] = [{"step": 0, "epoch": 0, "eval_loss": 3.0, "eval_runtime": 1.0}]
    for step in range(1, steps + 1):
        flat = 1000 + 100 * (step % 3)
        entry = {"step": step, "epoch": step / steps, "loss": 2 + math.exp(-step), "grad_norm": 1.0 + step % 2}
        entry |= {"tree/flat_tokens": flat, "tree/computed_tokens": flat if linear else flat // 4}
        entry |= {"tree/unique_tokens": flat // 4, "tree/seconds": 2.0 if linear else 0.5}
        entry |= {"tree/tree_flops": 2e9, "tree/linear_flops": 1e10, "tree/peak_memory_bytes": 9e8 + 8e8 * linear}
        logs.append(entry | changes)
    logs.append({"step": steps, "epoch": 1, "train_runtime": 80.0 if linear else 20.0, "train_loss": 2.2})
    folder.mkdir(parents=True, exist_ok=True)
    state = {"global_step": steps, "max_steps": 8, "log_history": logs}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


class Page(HTMLParser):
    """Words and links of a page; elements that close in another order than they opened fail."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.words: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        links = [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "xlink:href")]
        self.loaded += [link for link in links if link != "data:," and not link.startswith("#")]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]} in line {self.getpos()[0]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def test_a_comparison_says_how_far_the_losses_are_apart_and_what_of_the_ideal_was_reached(tmp_path):
    tree, linear = write_state(tmp_path / "a", loss=2.0), write_state(tmp_path / "b", linear=True, loss=2.0)
    found = compare_runs(read_run(tree), read_run(linear))
    assert found == {
        "common_steps": 8,
        "same_work": True,
        "largest_difference": 0.0,
        "speedup": 4.0,
        "ideal": 5.0,
        "efficiency": 0.8,
    }
    assert write_page(tree, linear, tmp_path / "page.html") == tmp_path / "page.html"
    page = Page((tmp_path / "page.html").read_text())
    for words in (
        "measured speed-up 4.00×",
        "FLOP-ideal 5.00×",
        "efficiency 0.800",
        "losses 0 over 8 steps of the same",
    ):
        assert words in page.text
    for words in ("tree 500 ms", "linear 2 s", "tree 900 MB", "linear 1.7 GB"):
        assert words in page.text, words
    assert "at most 0; 0 is drawn at 1e-09" in page.text and page.loaded == []


def test_runs_of_other_rows_have_no_speed_up(tmp_path):
    tree, linear = write_state(tmp_path / "a"), write_state(tmp_path / "b", linear=True, **{"tree/flat_tokens": 999})
    found = compare_runs(read_run(tree), read_run(linear))
    assert (found["same_work"], found["speedup"], found["efficiency"]) == (False, None, None)
    page = Page(write_page(tree, linear, tmp_path / "page.html").read_text())
    assert "speed-up" not in page.text.lower()


@pytest.mark.slow
def test_losses_that_are_no_numbers_and_names_that_are_html_do_no_harm(tmp_path):
    more = {"loss": math.nan, "<script>": 1.0, "reward": math.inf}
    page = write_page(write_state(tmp_path / "a", **more), write_state(tmp_path / "b"), tmp_path / "page").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert Page(page).loaded == []


def test_plain_runs_without_numbers_about_trees_are_compared_too(tmp_path):
    plain = [write_state(tmp_path / name) for name in "ab"]
    for folder in plain:
        state = json.loads((folder / "trainer_state.json").read_text())
        logs = [{k: v for k, v in entry.items() if not k.startswith("tree/")} for entry in state["log_history"]]
        (folder / "trainer_state.json").write_text(json.dumps(state | {"log_history": logs}))
    page = Page(write_page(*plain, tmp_path / "page.html").read_text())
    assert "overlap" not in page.text and "losses 0 over 8 steps" in page.text


def test_a_folder_without_logs_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"has no trainer_state\.json; call trainer\.save_state"):
        write_page(tmp_path, tmp_path, tmp_path / "page.html")


@pytest.mark.slow
def test_figures_take_their_colours_and_letters_from_the_page(tmp_path):
    runs = write_state(tmp_path / "a", steps=100), write_state(tmp_path / "b", linear=True, steps=100)
    text = write_page(*runs, tmp_path / "page.html").read_text()
    figures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(figures) >= 5
    for figure in figures:
        assert "<text" in figure and "var(--soft)" in figure and "font:" not in figure
        assert not any(colour in figure for colour in COLOURS.values())


LOOK = """
const shown = [...document.querySelectorAll("svg")].filter(s => s.getBoundingClientRect().width > 0)
return {
  width: document.documentElement.scrollWidth,
  back: getComputedStyle(document.body).backgroundColor,
  stroke: getComputedStyle(shown[0].querySelector('path[style*="--c0"]')).stroke,
  letters: Math.min(...shown.map(s => s.querySelector("text").getBoundingClientRect().height)),
}
"""


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1240])
def test_a_browser_shows_it_on_a_phone_and_on_a_desk_in_light_and_dark(tmp_path, width, scheme):
    tree, linear = write_state(tmp_path / "a"), write_state(tmp_path / "b", linear=True)
    page = write_page(tree, linear, tmp_path / "page.html")
    found = look(page, LOOK, width=width, dark=scheme == "dark")
    assert found["width"] <= width, "nothing is wider than the window"
    assert found["letters"] >= 9, "pixels; the letters of figures can be read"
    light = scheme == "light"
    assert found["back"] == ("rgb(246, 247, 249)" if light else "rgb(18, 22, 27)")
    assert found["stroke"] == ("rgb(11, 111, 184)" if light else "rgb(92, 179, 242)")


def test_the_command_writes_the_page_of_one_run_and_its_legends_name_the_step(tmp_path, capsys):
    from treetrain.cli import main

    run, page = write_state(tmp_path / "a"), tmp_path / "run.html"
    assert main(["page", str(run), "--html", str(page)]) == 0 and str(page) in capsys.readouterr().out
    text, last = page.read_text(), max(read_run(run)["loss"])
    assert f" at step {last}</b>" in text and "linear: all measures" not in text
    assert main(["page", str(run), str(run), "--html", str(page)]) == 0
    assert "linear: all measures" in page.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no JSON of a run"),
        ("[" * 100_000, "is no JSON of a run"),
        ("[]", "`log_history` is None, expected a list"),
        ('{"log_history": 3}', "`log_history` is 3"),
        ('{"log_history": [3]}', r"`log_history\.0` is 3, expected an object"),
        ('{"log_history": [{"loss": 1.0}]}', r"`log_history\.0\.step` is None, expected a whole number"),
        ('{"log_history": [{"step": "1", "loss": 1}]}', r"`log_history\.0\.step` is '1'"),
        ('{"log_history": [{"step": 1.5, "loss": 1}]}', r"`log_history\.0\.step` is 1\.5"),
        ('{"log_history": [{"step": 1, "loss": 1' + "0" * 400 + "}]}", r"`log_history\.0\.loss` is 1000"),
        ('{"log_history": [{"step": 1, "loss": 1e300}]}', r"`log_history\.0\.loss` is 1e\+300"),
    ],
    ids=range(10),
)
def test_a_state_that_no_run_wrote_is_refused_with_file_and_field(text: str, message: str, tmp_path) -> None:
    (tmp_path / "trainer_state.json").write_text(text)
    with pytest.raises(DataError, match=rf"trainer_state\.json: {message}"):
        write_page(tmp_path, None, tmp_path / "run.html")


def test_values_of_other_kinds_are_no_figures(tmp_path) -> None:
    entries = [{"step": n, "loss": 1.0 / n, "x": True, "y": [1], "z": None, "w": math.nan} for n in (1, 2, 3)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": entries}))
    assert set(read_run(tmp_path)) == {"loss", "w"}
    write_page(tmp_path, None, tmp_path / "run.html")


def test_the_page_and_its_pictures_are_written_into_the_folder_of_the_run(tmp_path, capsys, monkeypatch) -> None:
    from treetrain.cli import main

    monkeypatch.chdir(tmp_path)
    write_state(tmp_path / "a")
    write_state(tmp_path / "b", linear=True)
    for _ in range(2):  # its own files are replaced
        assert main(["page", "a", "b"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("the page is a/run.html, its figures are a/run.png")
    assert sorted(path.name for path in tmp_path.glob("*")) == ["a", "b"]
    assert sorted(path.name for path in (tmp_path / "a").glob("run.*")) == ["run.html", "run.png", "run.svg"]
    assert (tmp_path / "a/run.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "a/run.svg").read_text()
    page = (tmp_path / "a/run.html").read_text()
    titles = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert len(titles) == 7 and all(f">{title}</text>" in drawn for title in titles)
    assert "measured median 4.00×" in drawn and ElementTree.fromstring(drawn).tag.endswith("svg")


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture_replaces_no_file_of_others(tmp_path, kind) -> None:
    run, out = write_state(tmp_path / "a"), tmp_path / f"run.{kind}"
    out.write_bytes(b"\x89PNG of somebody else" * 100)
    with pytest.raises(DataError, match="is there, and treetrain did not write it"):
        write_picture(run, None, out)
    assert out.read_bytes() == b"\x89PNG of somebody else" * 100
    (tmp_path / "target").write_text("kept")
    (link := tmp_path / f"link.{kind}").symlink_to(tmp_path / "target")
    with pytest.raises(DataError, match="is a link"):
        write_picture(run, None, link)
    assert (tmp_path / "target").read_text() == "kept"


def test_a_figure_shows_the_tokens_a_second_that_a_trainer_logs(tmp_path) -> None:
    run = write_state(tmp_path / "a", **{"tree/tokens_per_second": 2000.0})
    page = Page(write_page(run, None, tmp_path / "page.html").read_text())
    assert "Tokens a second tree 2k at step 8" in page.text
