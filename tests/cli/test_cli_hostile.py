"""What others have written neither reaches the terminal as it is nor leads the commands to other files."""

import json
import os
import zipfile
from pathlib import Path

import pytest

from treetrain.core.errors import DataError
from treetrain.logs.load import load

ESCAPE = "\x1b[2J\x9b31m\u202e"


def lines(count: int = 1) -> str:
    return '{"input_ids": [1, 2, 3]}\n' * count


@pytest.mark.parametrize("kind", ["member", "file", "left out", "template", "model_type", "split", "role", "id"])
def test_escape_sequences_of_others_do_not_reach_the_terminal(kind, treetrain, model_folder, tmp_path) -> None:
    path, more = tmp_path / "rows.jsonl", []
    path.write_text(lines())
    if kind == "member":
        path = tmp_path / "rows.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"a{ESCAPE}.jsonl", '{"a": }')
    elif kind in ("file", "left out"):
        name = f"b{ESCAPE}" + (".jsonl" if kind == "file" else ".csv")
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "rows.jsonl").write_text(lines())
        path = tmp_path / "data"
        (path / name).write_text("{")
    elif kind == "template":
        path.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}))
        (tmp_path / "t.jinja").write_text("{{ raise_exception('" + ESCAPE + "') }}")
        more = ["--model", model_folder, "--chat_template", tmp_path / "t.jinja"]
    elif kind == "model_type":
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": f"a{ESCAPE}"}))
        more = ["--model", tmp_path / "model"]
    elif kind == "split":
        path = tmp_path / "set"
        (path / f"s{ESCAPE}").mkdir(parents=True)
        (path / f"s{ESCAPE}" / "state.json").write_text("{}")
        (path / "dataset_dict.json").write_text("{}")
    elif kind == "role":
        path.write_text(json.dumps({"messages": [{"role": ESCAPE, "content": "a"}]}))
        more = ["--model", model_folder]
    else:
        path.write_text(json.dumps({"input_ids": [1, 2], ESCAPE: 1, "group_id": ESCAPE}))
    answer = treetrain("inspect", path, *more)
    shown = (answer.out + answer.err).replace("\n", "").replace("\r", "")
    assert not set(ESCAPE) & set("\x1b\x9b\u202e") & set(shown), shown
    assert kind in ("id", "left out") or answer.code == 2


def test_a_page_replaces_only_pages_and_no_link_is_written_through(treetrain, token_file, tmp_path) -> None:
    rows = Path(token_file).read_text()
    (tmp_path / "link.html").symlink_to(token_file)
    (tmp_path / "dangling.html").symlink_to(tmp_path / "nothing")
    for name, message in (
        (token_file, "is there, and treetrain did not write it; give another name"),
        (tmp_path / "link.html", "is a link to "),
        (tmp_path / "dangling.html", "is a link to "),
        (tmp_path, "is no file"),
    ):
        assert message in treetrain("inspect", token_file, "--html", name).error
    assert Path(token_file).read_text() == rows and not (tmp_path / "nothing").exists()
    for _ in range(2):
        assert treetrain("inspect", token_file, "--html", tmp_path / "page.html").code == 0
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_the_list_of_skipped_records_is_not_written_through_a_link(treetrain, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(lines() + "{\n")
    Path("theirs").write_text("theirs")
    Path("treetrain-skipped.txt").symlink_to("theirs")
    assert "treetrain-skipped-2.txt" in treetrain("inspect", "rows.jsonl", "--on_error", "skip").err
    assert Path("theirs").read_text() == "theirs" and Path("treetrain-skipped-2.txt").exists()


def test_a_link_out_of_a_folder_is_refused_and_nothing_of_it_is_shown(tmp_path) -> None:
    (tmp_path / "secret").write_text("password")
    folder = tmp_path / "repo" / "snapshots" / "1"
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match=r"is a link to .*secret.*, out of the folder; name its file") as refused:
        load(folder)
    assert "password" not in str(refused.value)
    (folder / "rows.jsonl").unlink()
    (tmp_path / "repo" / "blobs").mkdir()
    (tmp_path / "repo" / "blobs" / "1234").write_text(lines())
    os.symlink("../../blobs/1234", folder / "rows.jsonl")  # as huggingface_hub stores a data set
    assert len(load(folder).trajectories) == 1
