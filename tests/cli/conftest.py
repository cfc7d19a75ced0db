"""A model folder with a tokenizer, small files, and the command line in this process."""

import json
import random
from pathlib import Path

import pytest

from support.models import make_model
from treetrain.cli import main
from treetrain.models.loading import load_tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved Qwen3 with the built-in tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    load_tokenizer("tiny").save_pretrained(folder)
    make_model(vocab_size=2048, max_position_embeddings=256, tie_word_embeddings=True).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    """Four groups of three rows: 10 shared tokens, 5 trained ones each."""
    drawn = random.Random(0)
    lines = []
    for group in range(4):
        prompt = [drawn.randrange(5, 2000) for _ in range(10)]
        for _ in range(3):
            row = {"input_ids": prompt + [drawn.randrange(5, 2000) for _ in range(5)], "loss_mask": [0] * 10 + [1] * 5}
            lines.append(json.dumps(row | {"reward": drawn.random(), "group_id": f"task-{group}"}))
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


@pytest.fixture
def chat_file(tmp_path: Path) -> str:
    """Two tasks, two trials each, of two calls each."""
    lines = []
    for task in range(2):
        for trial in range(2):
            messages = [
                {"role": "user", "content": f"What is {task} + 3?"},
                {"role": "assistant", "content": f"Let me think, try {trial}."},
                {"role": "user", "content": "Go on."},
                {"role": "assistant", "content": f"It is {task + 3}."},
            ]
            lines.append(json.dumps({"messages": messages, "task_id": task, "trial": trial, "reward": trial}))
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


class Answer:
    """Exit code and output of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line of a refusal; anything else is a failure of the test."""
        lines = [line for line in self.err.splitlines() if not line.startswith("note: ")]
        assert self.code == 2 and self.out == "" and len(lines) == 1, (self.code, self.out, self.err)
        assert lines[0].startswith("treetrain: error: ")
        return lines[0]


@pytest.fixture
def treetrain(capsys: pytest.CaptureFixture[str]):
    """Run a command in this process."""

    def run(*argv: str) -> Answer:
        capsys.readouterr()
        try:
            code = main([str(word) for word in argv])
        except SystemExit as stop:
            code = int(stop.code or 0)
        said = capsys.readouterr()
        return Answer(code, said.out, said.err)

    return run
