"""`treetrain inspect` on a file that does not fit in memory."""

import json

from treetrain.inspection.sample import Sampler


def test_inspect_says_what_is_exact_and_what_is_sampled(treetrain, monkeypatch, tmp_path) -> None:
    rows = [
        {"input_ids": [7] * 9 + [group, group, try_], "group_id": group} for group in range(60) for try_ in range(3)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    whole = treetrain("inspect", path, "--json").json
    monkeypatch.setattr(
        Sampler.__init__,
        "__kwdefaults__",
        {**Sampler.__init__.__kwdefaults__, "memory_tokens": 1000, "sample_tokens": 500},
    )
    answer = treetrain("inspect", path, "--json", "--html", tmp_path / "page.html")
    assert answer.json["file"] == whole["file"] and "exact (an external merge)" in answer.err
    assert "exact (an external merge)" in (tmp_path / "page.html").read_text()
    assert "This is a sample of whole groups: " in (tmp_path / "page.html").read_text()
    assert "a sample: " in treetrain("inspect", path).out
