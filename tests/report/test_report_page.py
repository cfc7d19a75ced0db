"""The page of a run: whole, safe, self-contained, in every state, small and fast."""

import json
import os
import re
import time

import numpy as np
import pytest
from reading import Page
from recorded import policy_facts

from treetrain.report.page import REFRESH_SECONDS, run_page, write_page
from treetrain.report.records import read_run

SFT_CHARTS = {"loss", "lr", "grad_norm", "tokens-per-second", "overlap", "ideal", "flops", "time", "memory"}
POLICY_CHARTS = {"kl", "clip_fraction", "entropy", "ratio", "advantage", "policy_loss", "row_tokens_mean", "reward"}
END = {"kind": "end", "steps": 12}


def page_of(folder, **options) -> Page:
    return Page(run_page(read_run(folder), **options))


def test_a_page_holds_a_chart_of_everything_an_sft_run_records(make_run) -> None:
    page = page_of(make_run(stop=END))
    assert page.charts == SFT_CHARTS | {"row_tokens_mean"}
    assert "Finished" in page.text and "12 steps" in page.text and "tree execution" in page.text


def test_a_policy_run_adds_rewards_and_diagnostics_and_its_held_out_loss(make_run) -> None:
    page = page_of(make_run(config={"loss": "grpo"}, change=policy_facts, evaluations={0: 2.0, 6: 1.5, 12: 1.0}))
    assert page.charts == SFT_CHARTS | POLICY_CHARTS | {"eval-nll"}
    assert "nats per token" in page.text and "share of tokens" in page.text


def test_preference_measures_and_unknown_ones_have_a_place(make_run) -> None:
    facts = {"accuracy": 0.7, "margin": 0.2, "chosen_reward": 0.3, "rejected_reward": 0.1, "gradient noise <2>": 5.0}
    page = page_of(make_run(config={"loss": "dpo"}, change=lambda step: facts))
    assert {"accuracy", "margin", "chosen_reward", "other-gradient-noise--2-"} <= page.charts
    assert "More measures" in page.text and "gradient noise <2>" in page.text


def test_hundreds_of_unknown_measures_do_not_swell_the_page(make_run) -> None:
    text = run_page(read_run(make_run(change=lambda step: {f"m{number}": float(step) for number in range(300)})))
    page = Page(text)
    assert len([key for key in page.charts if key.startswith("other-")]) == 40
    assert "m299" in page.text and len(text) < 1_000_000


def test_a_record_of_nothing_but_steps_and_losses_is_enough(make_run, tmp_path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    lines = [{"kind": "train", "step": step, "loss": 1.0 / step} for step in range(1, 4)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page = page_of(folder)
    assert page.charts == {"loss"} and "step 3" in page.text


@pytest.mark.parametrize(
    ("stop", "age", "state"),
    [
        (None, 0, "Running"),
        (None, 299, "Running"),
        (None, 301, "Silent"),
        (END, 10_000, "Finished"),
        ({"kind": "interrupted", "step": 5}, 10_000, "Interrupted"),
        ({"kind": "failed", "error": "FloatingPointError: loss is nan"}, 10_000, "Failed"),
    ],
)
def test_a_page_says_what_state_its_run_is_in(make_run, stop, age, state) -> None:
    folder = make_run(steps=5, stop=stop)
    run = read_run(folder)
    text = run_page(run, now=run.updated + age)
    page = Page(text)
    assert page.text.split("execution")[1].split()[0] == state
    assert ("http-equiv" in text) == (state == "Running")
    assert ("loss is nan" in page.text) == (state == "Failed")
    assert ("of 12" in page.text) == (state != "Finished")
    if state == "Running":
        assert "about 3.5 s left" in page.text and f"every {REFRESH_SECONDS} seconds" in page.text


def test_a_run_that_went_on_after_an_interruption_is_running_and_repeats_no_step(make_run) -> None:
    folder = make_run(steps=5, stop={"kind": "interrupted", "step": 5})
    path = folder / "metrics.jsonl"
    for step, loss in ((5, 50.0), (6, 60.0)):
        path.write_text(path.read_text() + json.dumps({"kind": "train", "step": step, "loss": loss}) + "\n")
    run = read_run(folder)
    assert run.state(run.updated) == "running" and run.step == 6
    assert run.column("loss").steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert run.column("loss").values[-2:].tolist() == [50.0, 60.0]


def test_what_users_write_is_shown_and_never_obeyed(make_run) -> None:
    evil = '"><script>alert(1)</script>&lt;'
    folder = make_run(
        config={"model": evil, evil: evil, "data": [evil]},
        start={"plan": evil, "versions": {evil: evil}, "machine": evil},
        change=lambda step: {evil: float(step)},
        stop={"kind": "failed", "error": evil},
    )
    text = run_page(read_run(folder))
    page = Page(text)
    assert page.text.count(evil) >= 8
    assert text.count("<script>") == 1 and "alert(1)</script>" not in text


def test_nothing_is_loaded_from_anywhere(make_run) -> None:
    text = run_page(read_run(make_run(config={"loss": "grpo"}, change=policy_facts)))
    page = Page(text)
    assert page.loaded == []
    assert not re.findall(r"(?:https?:)?//[a-z]|@import|url\(|fetch\(|XMLHttp|WebSocket", text)


def test_every_chart_has_axes_a_legend_and_values_where_the_pointer_is(make_run) -> None:
    text = run_page(read_run(make_run()))
    for figure in re.findall(r'<figure class="card.*?</figure>', text, re.DOTALL):
        assert figure.count("optimiser step") >= 1 and 'class="legend"' in figure and "<title>step 1" in figure
        assert len(re.findall('class="tick"', figure)) >= 4


def test_lines_are_drawn_where_the_numbers_say(make_run) -> None:
    folder = make_run(steps=3, evaluations={}, change=lambda step: {"grad_norm": [0.0, 10.0, 5.0][step - 1]})
    figure = run_page(read_run(folder)).split('id="chart-grad_norm"')[1].split("</figure>")[0]
    points = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', figure)
    (x1, y1), (x2, y2), (x3, y3) = [(float(x), float(y)) for x, y in points]
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2) and y1 > y3 > y2  # upwards is smaller in an SVG
    assert y3 - y2 == pytest.approx(y1 - y3, abs=0.2)


def test_a_number_that_is_none_is_a_gap_and_never_a_point(make_run) -> None:
    folder = make_run(steps=5, change=lambda step: {"grad_norm": None if step == 3 else float(step)})
    figure = run_page(read_run(folder)).split('id="chart-grad_norm"')[1].split("</figure>")[0]
    assert figure.count("<circle") == 4 and "nan" not in figure.lower()
    (path,) = re.findall(r'class="line c0" d="([^"]*)"', figure)
    assert path.count("M") == 2


def test_a_budget_in_bytes_is_a_line_in_the_memory_chart(make_run) -> None:
    start = {"bytes_loaded": 400_000_000, "bytes_at_rest": 100_000_000}
    page = page_of(make_run(config={"budget": "1GB"}, start=start))
    assert "budget and what is at rest 1.5 GB" in page.text
    assert "what is at rest" not in page_of(make_run(config={"budget": 4096}, start=start)).text


def test_ten_thousand_steps_are_a_page_within_a_second_and_a_megabyte(make_run) -> None:
    spike = 7_123
    folder = make_run(
        steps=10_000,
        total=10_000,
        config={"loss": "grpo"},
        change=lambda step: policy_facts(step) | ({"grad_norm": 1e4} if step == spike else {}),
    )
    started = time.process_time()
    text = run_page(read_run(folder))
    assert time.process_time() - started < 1.0
    assert len(text.encode()) < 1_000_000
    figure = text.split('id="chart-grad_norm"')[1].split("</figure>")[0]
    (spread,) = re.findall(r'class="spread c0" d="([^"]*)"', figure)
    heights = sorted({float(y) for y in re.findall(r" ([\d.]+)", spread)})
    assert heights[0] < 20 < 100 < heights[2]  # the one spike is not thinned away


def test_a_page_takes_the_place_of_the_old_one_at_once_or_not_at_all(tmp_path, monkeypatch) -> None:
    path = tmp_path / "deep" / "page.html"
    write_page("old", path)
    assert path.read_text() == "old" and path.stat().st_mode & 0o777 == 0o644

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        write_page("new", path)
    assert path.read_text() == "old" and [entry.name for entry in path.parent.iterdir()] == ["page.html"]


def test_a_folder_without_metrics_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"there is no metrics\.jsonl in it"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("what\n[1]\n")
    with pytest.raises(ValueError, match="none of its 2 lines is a record"):
        read_run(tmp_path)


def test_half_a_line_at_the_end_is_a_record_that_is_being_written(make_run) -> None:
    folder = make_run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    run = read_run(folder)
    assert run.step == 12 and run.unreadable == 1
    assert np.isfinite(run.column("loss").values).all()
