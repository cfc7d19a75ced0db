"""Play countdown and record the branching trajectories that the project ships.

    python -m examples.countdown.record                 # rewrites train.jsonl.gz and heldout.jsonl.gz
    python -m examples.countdown.record --out elsewhere

For every task a trial or two are played from the start. The rest branch off: a state of an earlier episode is
continued, perhaps by an agent of another skill, to its end. So the trajectories of a task are
the leaves of a search tree and share its prefixes. One row is one leaf. The same seed gives the same rows,
byte for byte (the compressed bytes depend on the zlib version).
"""

import argparse
import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from examples.countdown.chat import Episode, begin
from examples.countdown.environment import TOOLS, Puzzle, legal_moves, reward
from examples.countdown.policies import POLICIES, Policy, pick

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Split:
    """One file: the number of puzzles, and the random seed."""

    name: str
    tasks: int
    seed: int


SPLITS = (Split("train", tasks=64, seed=1), Split("heldout", tasks=12, seed=2))
FRESH_TRIALS = (1, 2)  # trials from the start, per task: least, most
LEAVES = (11, 16)  # trajectories per task: least, most
GIVEN = (3, 4, 4, 5)  # how many numbers a puzzle has


def draw_puzzle(rng: Random) -> Puzzle:
    """A puzzle that has a solution (its target is found by playing) and none of one calculation."""
    while True:
        given = tuple(1 + int(rng.random() * 12) for _ in range(pick(rng, GIVEN)))
        numbers = given
        for _ in range(len(given) - 1 if rng.random() < 0.6 else 2):
            numbers = pick(rng, legal_moves(numbers))[1]
        one_away = {after[-1] for _, after in legal_moves(given)}
        target = numbers[-1]
        if 10 <= target <= 99 and target not in given and target not in one_away:
            return Puzzle(given, target)


def play(episode: Episode, policy: Policy, rng: Random) -> list[Episode]:
    """Play to the end; returns all episodes on the way, from the given one to the finished one."""
    passed = [episode]
    while not passed[-1].state.done:
        passed.append(passed[-1].after(policy(passed[-1].state, rng)))
    return passed


def grow(puzzle: Puzzle, rng: Random) -> list[Episode]:
    """The finished episodes of one task: fresh trials, then branches off earlier ones. No two are equal."""
    policies = list(POLICIES.values())
    leaves = _between(rng, LEAVES)
    fresh = _between(rng, FRESH_TRIALS)
    lines: list[list[Episode]] = []
    while len(lines) < leaves:
        policy = pick(rng, policies)
        if len(lines) < fresh:
            line = play(begin(puzzle), policy, rng)
        else:
            trunk = pick(rng, lines)
            fork = _late(rng, len(trunk) - 1)
            line = trunk[:fork] + play(trunk[fork], policy, rng)
        if all(line[-1] != other[-1] for other in lines):
            lines.append(line)
    return [line[-1] for line in lines]


def rows(split: Split, taken: set[Puzzle]) -> Iterator[Row]:
    """The rows of one file. Puzzles in `taken` are not used again; those used are added to it."""
    for task in range(split.tasks):
        rng = Random(f"countdown/{split.seed}/{task}")
        puzzle = draw_puzzle(rng)
        while _canonical(puzzle) in taken:
            puzzle = draw_puzzle(rng)
        taken.add(_canonical(puzzle))
        task_id = f"{split.name}-{task:03d}"
        for trial, episode in enumerate(grow(puzzle, rng)):
            yield {
                "id": f"{task_id}-{trial:02d}",
                "task_id": task_id,
                "trial": trial,
                "reward": reward(episode.state),
                "messages": list(episode.messages),
                "tools": TOOLS,
            }


def write(path: Path, lines: Iterable[Row]) -> None:
    """Write rows as gzipped JSON lines, without time or path in the bytes."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in lines)
    path.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


def record(folder: Path) -> list[Path]:
    """Write every split into `folder`; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    taken: set[Puzzle] = set()
    files = []
    for split in SPLITS:
        files.append(folder / f"{split.name}.jsonl.gz")
        write(files[-1], rows(split, taken))
    return files


def _between(rng: Random, bounds: tuple[int, int]) -> int:
    return bounds[0] + int(rng.random() * (bounds[1] - bounds[0] + 1))


def _late(rng: Random, turns: int) -> int:
    """The turn to fork at; later ones are likelier, since a search mostly goes back a few steps."""
    return int(turns * max(rng.random() for _ in range(4)))


def _canonical(puzzle: Puzzle) -> Puzzle:
    return Puzzle(tuple(sorted(puzzle.numbers)), puzzle.target)


def main() -> None:
    """Command line: write the files and print their sizes."""
    parser = argparse.ArgumentParser(description="Record the shipped countdown trajectories.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the files")
    for path in record(parser.parse_args().out):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
