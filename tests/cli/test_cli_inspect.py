"""`treetrain inspect`: figures against brute force, and no torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from treetrain.cli.inspect import Progress
from treetrain.core.planning.cost import CostModel
from treetrain.core.planning.devices import Device
from treetrain.core.tree.token_tree import build_tree
from treetrain.logs.load import load
from treetrain.models.costs import count_named
from treetrain.models.loading import load_tokenizer
from treetrain.models.work import linear_work, tree_stats
from treetrain.shapes import ModelShape, make_plan


def unique_by_brute_force(rows: list[list[int]]) -> int:
    return len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})


def test_the_figures_of_a_file_are_those_of_its_rows(treetrain, token_file) -> None:
    report = treetrain("inspect", token_file, "--json").json
    rows = [row.ids.tolist() for row in load(token_file).trajectories]
    file = report["file"]
    assert file["flat"] == sum(map(len, rows)) == 180 and file["unique"] == unique_by_brute_force(rows)
    assert file["overlap"] == 1 - file["unique"] / 180 and file["token_speedup"] == 180 / file["unique"]
    assert (file["trajectories"], file["trees"], file["longest_path"], file["duplicates"]) == (12, 4, 15, 0)
    assert file["trained_flat"] == 60 and file["saved_trained"] + file["saved_context"] == 180 - file["unique"]
    assert report["format"] == "tokens" and report["view"] is None and report["transcripts"] == 1


@pytest.mark.slow
def test_the_shape_behind_the_flop_figures_is_always_named(treetrain, token_file, model_folder) -> None:
    tree = build_tree(load(token_file).trajectories)
    for argv, name, assumed, shape in (
        ([], "qwen3-8b", True, ModelShape.named("qwen3-8b").counts()),
        (["--shape", "qwen3-0.6b"], "qwen3-0.6b", False, ModelShape.named("qwen3-0.6b").counts()),
        (["--model", "tiny"], "tiny", False, count_named("tiny")),
        (["--model", model_folder], model_folder, False, count_named(model_folder)),
    ):
        report = treetrain("inspect", token_file, "--json", *argv).json
        assert report["shape"] == {"name": name, "assumed": assumed}
        assert report["file"]["flop_speedup"] == tree_stats(tree, shape).flop_speedup
        assert name in "".join(treetrain("inspect", token_file, *argv).out.split())


def test_square_brackets_in_a_row_s_id_are_no_markup(treetrain, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    ids = [[999, *range(60)], list(range(60))]
    rows = [{"input_ids": row, "loss_mask": [0] * 50 + [1] * (len(row) - 50), "id": "[/red] [0]"} for row in ids]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert "'[/red] [0]' differs from '[/red] [0]'" in treetrain("inspect", path).out


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def test_the_table_shows_what_the_json_says(treetrain, token_file) -> None:
    answer = treetrain("inspect", token_file)
    assert answer.code == 0 and "qwen3-8b (assumed" in answer.out
    for expected in ("flat tokens", "180", "FLOP-ideal speed-up", "longest path", "context", "forks"):
        assert expected in answer.out
    assert "note: " not in answer.out


def test_repeats_are_counted_and_rows_without_a_mask_are_trained_with_a_note(treetrain, tmp_path) -> None:
    path = tmp_path / "plain.jsonl"
    path.write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [1, 2, 3]}\n')
    answer = treetrain("inspect", str(path))
    assert "1 exact repeats" in answer.out and "note: no labels" in answer.err


def test_a_chat_file_in_the_calls_view_is_told_whether_its_template_keeps_prefixes(
    treetrain, chat_file, model_folder, tmp_path
) -> None:
    kept = treetrain("inspect", chat_file, "--model", model_folder, "--view", "calls", "--json").json
    assert kept["diagnosis"]["successive"] == 4 and kept["diagnosis"]["broken"] == 0
    assert kept["file"]["trajectories"] == 8 and kept["view"] == "calls"
    breaking = tmp_path / "breaking.jinja"
    breaking.write_text(
        "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    argv = ("inspect", chat_file, "--tokenizer", "tiny", "--view", "calls", "--chat-template", str(breaking))
    report = treetrain(*argv, "--json").json
    (lost,) = report["diagnosis"]["causes"]
    assert report["diagnosis"]["broken"] == lost["rows"] == 4 and lost["cause"] == "values"
    out = in_one_line(treetrain(*argv).out)
    assert "0 of 4 later calls extend" in out and lost["title"] in out and lost["change"] in out
    assert in_one_line(lost["row_text"]) in out and out.endswith(report["verdict"])
    transcripts, calls = (
        build_tree(
            load(chat_file, tokenizer=load_tokenizer("tiny"), view=view, chat_template=str(breaking)).trajectories
        )
        for view in ("transcript", "calls")
    )
    counts = ModelShape.named("qwen3-8b").counts()
    one, other = (counts.flops(*linear_work(tree)) for tree in (transcripts, calls))
    assert report["transcripts"] == one / other and kept["transcripts"] == 1


def test_conversations_without_any_tokenizer_are_refused_with_the_cure(treetrain, chat_file) -> None:
    assert "line 1" in (error := treetrain("inspect", chat_file).error) and "--tokenizer" in error


def test_ids_are_checked_against_the_model_s_vocabulary(treetrain, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n{"input_ids": [1, 2048]}\n')
    assert treetrain("inspect", str(path)).code == 0
    error = treetrain("inspect", str(path), "--model", "tiny").error
    assert f"{path} line 2" in error and "2048" in error


def test_a_budget_adds_the_plan_of_the_file_as_one_batch(treetrain, token_file) -> None:
    argv = ("inspect", token_file, "--model", "tiny")
    assert treetrain(*argv, "--json").json["plan"] is None and "peak memory" not in treetrain(*argv).out
    plan = treetrain(*argv, "--json", "--budget", "20").json["plan"]
    tree = build_tree(load(token_file).trajectories)
    made = make_plan(tree, CostModel.on(Device.of_kind("cpu", 4), count_named("tiny")), budget=20)
    assert plan == json.loads(json.dumps(made.explanation()))
    assert plan["peak_tokens"] <= 20 and plan["parts"] == made.num_parts > 1
    out = in_one_line(treetrain(*argv, "--budget", "20").out)
    assert in_one_line(made.explain()) in out and "on the shape tiny" in out


def test_a_budget_in_bytes_bounds_the_predicted_peak(treetrain, token_file) -> None:
    argv = ("inspect", token_file, "--model", "tiny", "--json", "--budget")
    plan = treetrain(*argv, "18MB").json["plan"]
    assert plan["peak_bytes"] <= 18e6
    assert plan["parts"] > treetrain(*argv, "1GB").json["plan"]["parts"] == 1
    assert "give at least that" in treetrain(*argv[:-2], "--budget", "1MB").error


def test_the_device_whose_speeds_are_taken_is_said(treetrain, token_file) -> None:
    argv = ("inspect", token_file, "--json", "--budget", "30", "--device")
    cpu, cuda = (treetrain(*argv, device).json["plan"] for device in ("cpu", "cuda"))
    assert cuda["seconds"] < cpu["seconds"] / 10
    assert "cpu" in cpu["speeds"] and "h100" in cuda["speeds"]


def test_calibrating_measures_the_model(treetrain, token_file, model_folder) -> None:
    plan = treetrain("inspect", token_file, "--model", model_folder, "--calibrate", "--json").json["plan"]
    assert plan["speeds"].startswith("measured on ") and plan["budget_tokens"] is None and plan["parts"] == 1
    assert "name it with --model" in treetrain("inspect", token_file, "--calibrate").error
    both = ("--model", "tiny", "--shape", "qwen3-8b", "--calibrate")
    assert "give no --shape" in treetrain("inspect", token_file, *both).error


def test_a_budget_that_is_none_is_refused_before_the_file_is_read(treetrain) -> None:
    assert "budget='lots'" in treetrain("inspect", "missing.jsonl", "--budget", "lots").error


NO_TORCH = """
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec
class Hidden(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "torch" else find(name, path, target)
sys.meta_path[:] = [Hidden if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
try:
    import torch
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("torch is still there")
from treetrain.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chat", "tokens"])
def test_inspect_works_where_torch_is_not_installed(kind, token_file, chat_file) -> None:
    argv = [chat_file, "--tokenizer", "tiny", "--view", "calls"]
    if kind == "tokens":
        argv = [token_file, "--shape", "qwen3-0.6b", "--budget", "200GB"]
    done = subprocess.run([sys.executable, "-c", NO_TORCH, "inspect", *argv, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["file"]["flat"] > 0


def test_training_where_torch_is_not_installed_says_what_to_install(token_file, tmp_path) -> None:
    argv = ["train", token_file, "--model", "tiny", "--output", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", NO_TORCH, *argv], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("treetrain: error: No module named 'torch'")
    assert "treetrain[train]" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_real_conversations_share_most_of_their_tokens_in_the_calls_view(
    treetrain, shared_data: Path, tmp_path
) -> None:
    lines = (shared_data / "tau_airline" / "trajectories.jsonl").read_text().splitlines()[:4]
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(lines))
    argv = ("inspect", str(path), "--tokenizer", "tiny", "--chat-template", "chatml", "--view", "calls", "--json")
    report = treetrain(*argv).json
    assert report["diagnosis"]["broken"] == 0 and report["file"]["overlap"] > 0.7
    rows = load(path, tokenizer=load_tokenizer("tiny"), view="calls", chat_template="chatml").trajectories
    assert report["file"]["unique"] == build_tree(rows).num_tokens


def test_a_parquet_file_is_inspected_as_jsonl_is(treetrain, token_file, tmp_path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in Path(token_file).read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found, expected = (treetrain("inspect", file, "--json").json for file in (tmp_path / "rows.parquet", token_file))
    assert found["file"] == expected["file"]


def test_options_of_reading_reach_the_reader_and_skipped_records_are_listed(treetrain, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ['{"ids": [1, 2, 3], "result": {"score": 1}}', "broken", '{"ids": [1, 2, 4], "result": {"score": 0}}']
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    mapped = ("--map", "input_ids=ids", "--map", "reward=result.score")
    report = treetrain("inspect", "rows.jsonl", *mapped, "--on-error", "skip", "--json").json
    assert report["file"]["trajectories"] == 2 and report["file"]["unique"] == 4
    assert any("1 of 3 records are skipped" in note for note in report["notes"])
    skipped = tmp_path / "treetrain-skipped.txt"
    assert skipped.read_text().startswith("rows.jsonl line 2: broken JSON")
    skipped.write_text("of another run")
    again = treetrain("inspect", "rows.jsonl", *mapped, "--on-error", "skip", "--json").json
    assert any("listed in treetrain-skipped-2.txt" in note for note in again["notes"])
    assert skipped.read_text() == "of another run"
    assert "--map: 'reward' is not KEY=PATH" in treetrain("inspect", "rows.jsonl", "--map", "reward").err


def test_progress_is_a_share_of_the_bytes_with_the_time_left_and_lines_where_there_is_no_terminal(
    tmp_path, monkeypatch, capsys
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    now = [100.0]
    monkeypatch.setattr("treetrain.cli.inspect.time.monotonic", lambda: now[0])
    shown: list[str] = []
    bar, lines = Progress([str(tmp_path)], shown.append), Progress([str(tmp_path)], None)
    with open(tmp_path / "b.jsonl", "rb", buffering=0) as file:
        file.read(500)
        for now[0] in (104.0, 109.0, 112.0):
            bar(7), lines(7)
        said = "reading: 7 rows, 75%, about 4 s left"
        assert bar.share() == (0.75 if Path("/proc/self/fdinfo").exists() else 0)
    if bar.sizes and Path("/proc/self/fdinfo").exists():
        assert shown[-1] == said and capsys.readouterr().err == said + "\n"  # at 112, ten seconds after the start


def test_the_report_fits_80_columns(treetrain, chat_file, model_folder, tmp_path) -> None:
    argv = ("inspect", chat_file, "--model", model_folder, "--view", "calls", "--batch-size", "3", "--budget", "200")
    ids = [[999, *range(60)], list(range(60))]
    rows = [{"input_ids": row, "loss_mask": [0] * 50 + [1] * (len(row) - 50), "id": "row " * 40} for row in ids]
    (path := tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tables, lost = treetrain(*argv).out, treetrain("inspect", path).out
    assert "FLOP-ideal speed-up" in tables and "in batches of 3" in tables and "speeds " in tables
    assert "First: 'row row" in lost
    assert max(map(len, [*tables.splitlines(), *lost.splitlines()])) <= 80


def test_a_row_is_shown_as_it_is_trained_with_what_was_dropped_and_where_its_mask_comes_from(
    treetrain, tmp_path
) -> None:
    said = [
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "x"},
    ]
    path = tmp_path / "chat.jsonl"
    rows = [{"messages": said[:2], "colour": 1}, {"messages": [*said, {"role": "assistant", "content": "\x1b[31m3"}]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    argv = ("inspect", path, "--tokenizer", "tiny", "--chat_template", "chatml")
    first, second = (treetrain(*argv, "--show", str(number)) for number in (1, 2))
    assert first.code == second.code == 0
    assert "<|im_start|>assistant\n⟦2<|im_end|>⟧\n" in first.out and first.out.count("⟦") == 2
    assert "keys that are not used: 1, such as 'colour'" in first.out and "not used" not in second.out
    assert "what is trained: the answers, as the chat template writes them" in first.out
    assert second.out.count("⟧") == 3 and "\x1b" not in second.out
    shown = treetrain(*argv, "--show", "2", "--json").json
    assert next(piece["text"] for piece in shown["pieces"] if piece["weight"]) == "2<|im_end|>"
    assert "there is no row 3: the files have 2 rows" in treetrain(*argv, "--show", "3").error


def test_a_shown_row_fits_80_columns_without_folders_and_says_that_its_answer_is_rejected(treetrain, tmp_path) -> None:
    folder = tmp_path / ("folder" * 20)
    folder.mkdir()
    pair = {"prompt": "tree?", "chosen": "Oak", "rejected": "Bus", **{f"score_{n}": n for n in range(9)}}
    (folder / "pairs.jsonl").write_text(json.dumps(pair))
    argv = ("inspect", folder / "pairs.jsonl", "--tokenizer", "tiny", "--show")
    chosen, rejected = (treetrain(*argv, number).out for number in ("1", "2"))
    assert max(map(len, rejected.splitlines())) <= 80
    assert "\nid .../pairs.jsonl line 1/rejected, pair .../pairs.jsonl line 1, chosen False\n\n" in rejected
    assert "the answer is rejected (chosen False): the loss sft refuses the row" in rejected
    assert "is rejected" not in chosen


def test_a_log_that_was_converted_says_that_its_answers_are_trained_and_not_the_name_of_a_key(
    treetrain, tmp_path
) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"trajectory_id": "t", "prompt_ids": [5, 6], "output_ids": [8, 9], "logprobs": [-1, -2]}\n')
    shown = treetrain("inspect", path, "--show", "1").out
    assert "5 6⟦8 9⟧" in shown and "what is trained: the tokens of the answers, as the log has them" in shown


def test_token_rows_are_shown_as_ids_and_the_keys_of_their_masks_are_named(treetrain, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "loss_weights": [0, 1, 0.5, 1]}\n')
    shown = treetrain("inspect", path, "--show", "1").out
    assert "5 6⟦7⟧(weight 0.5)⟦8⟧" in shown and "what is trained: `loss_mask` times `loss_weights` of the row" in shown


def test_nothing_to_train_is_no_verdict_and_no_success(treetrain, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input_ids": [5, 6], "loss_mask": [0, 0]}\n')
    for more in ((), ("--json",), ("--show", "1")):
        answer = treetrain("inspect", path, *more)
        assert answer.code == 1 and "Train as a tree" not in answer.out
    assert treetrain("inspect", path, "--json").json["verdict"].startswith("Nothing to train")


def test_the_page_says_of_every_row_where_its_mask_comes_from_and_what_was_dropped(treetrain, tmp_path) -> None:
    records = [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "colour": 1},
        {"input_ids": [5, 6, 8], "loss_weights": [0, 1, 0.5]},
        {"input_ids": [5, 6, 9]},
    ]
    (path := tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert treetrain("inspect", path, "--html", tmp_path / "page.html").code == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])["list"]
    said = [[data["said"][note] for note in notes] for notes in data["notes"]]
    assert said[0] == ["key that is not used: 'colour'", "what is trained: `loss_mask` of the row"]
    assert said[1] == ["what is trained: `loss_weights` of the row"]
    assert "every token is trained" in said[2][0] and said[2][1] == (
        "what is trained: all tokens, since nothing says which"
    )


def test_chats_without_a_tokenizer_are_refused_with_the_command_that_reads_them(treetrain, chat_file) -> None:
    said = treetrain("inspect", chat_file, "--view", "calls").error
    command = f"treetrain inspect {chat_file} --view calls --tokenizer Qwen/Qwen3-0.6B"
    assert said.endswith(f"chat.jsonl line 1: conversations need a tokenizer, your model's: {command}")
    assert treetrain(*command.replace("Qwen/Qwen3-0.6B", "tiny").split()[1:]).code == 0
