"""Make the programs in `examples/` importable, and read what they recorded."""

import gzip
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def countdown_folder() -> Path:
    """The folder with the committed transcripts."""
    return ROOT / "examples" / "countdown"


@pytest.fixture(scope="session")
def recorded(countdown_folder: Path) -> dict[str, list[dict]]:
    """The committed rows of each file."""
    files = {}
    for split in ("train", "heldout"):
        with gzip.open(countdown_folder / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
            files[split] = [json.loads(line) for line in lines]
    return files
