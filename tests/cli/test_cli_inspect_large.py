"""`treetrain inspect` on a file that does not fit in memory."""

import json

from treetrain.logs.inspection.sample import Sampler


def test_inspect_of_a_sample_says_so(treetrain, monkeypatch, tmp_path) -> None:
    rows = [
        {"input_ids": [7] * 9 + [group, group, try_], "group_id": group} for group in range(60) for try_ in range(3)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    whole = treetrain("inspect", path, "--json").json
    assert whole["sampled"] == 1
    sizes = Sampler.__init__.__kwdefaults__ | {"memory_tokens": 1000, "sample_tokens": 500}
    monkeypatch.setattr(Sampler.__init__, "__kwdefaults__", sizes)
    answer = treetrain("inspect", path, "--json", "--html", tmp_path / "page.html")
    assert 0 < answer.json["sampled"] < 0.5 and 200 < answer.json["file"]["flat"] <= 500
    assert abs(answer.json["file"]["overlap"] - whole["file"]["overlap"]) < 0.1
    assert "The figures are of a sample: " in answer.err and "on a sample of " in answer.json["verdict"]
    page = (tmp_path / "page.html").read_text()
    assert "This is a sample of whole groups" in page
    assert "a sample: " in treetrain("inspect", path).out
