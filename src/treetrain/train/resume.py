"""Where a run begins: anew, where an earlier one was left, or not at all since it is finished."""

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetrain.engine.ranks import Ranks
from treetrain.train import checkpoint_files
from treetrain.train.checkpoint_files import Checkpoint
from treetrain.train.config import TrainConfig
from treetrain.train.metrics import METRICS_FILE
from treetrain.train.result import TrainResult
from treetrain.train.same_run import RANKS, check_data, check_environment, check_length, check_settings
from treetrain.train.save import MARK, check_output

NEVER, AUTO = "never", "auto"
RESULTS = (MARK, "adapter_config.json")
"""One of them is there when a result is."""
LEFTOVERS = (".saving-*", ".*.html-*.tmp", f"{METRICS_FILE}.draft", f"{checkpoint_files.FOLDER}/.*-step-*")
"""What a killed run may leave behind in its folder."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a run begins with."""

    checkpoint: Checkpoint | None = None
    """To go on from; None begins with the first step."""
    finished: TrainResult | None = None
    """There is nothing left to do."""
    notes: tuple[str, ...] = ()
    """What the user should know."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The run that is to begin or to go on."""

    config: TrainConfig
    total: int
    """Steps."""
    data: Mapping[str, str]
    """Of `same_run.data_digests`."""
    environment: Mapping[str, Any]
    """Versions and machine."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Story:
    """What metrics.jsonl tells of the run in a folder."""

    config: dict[str, Any]
    data: dict[str, str] | None
    planned: int
    """Steps that it was to have."""
    done: int
    """Steps that it had."""
    losses: tuple[float, ...]
    end: dict[str, Any] | None
    """Its last record, if it came to its end."""
    came_from: str | None
    """The checkpoint that it went on from last."""


def find_start(wanted: Wanted, *, contents: bool = True, ranks: Ranks | None = None) -> Start:
    """Where a run begins by its `resume` setting. Changes nothing on disk.

    Args:
        wanted: the run.
        contents: check every byte of a checkpoint; else its manifest only.
        ranks: that share the run; the first of them looks. Collective.

    Raises:
        ValueError: the output folder holds something that the run would destroy, what is there is of another run, or
            no checkpoint of it is whole.
        RanksDisagree: on the other ranks, where the first one has raised.
    """
    if ranks is None or ranks.alone:
        return _found(wanted, contents)
    wanted = dataclasses.replace(wanted, environment={**wanted.environment, RANKS: ranks.size})
    _, told = ranks.agree("going on", lambda: (None, None if ranks.rank else _found(wanted, contents)))
    return told[0]


def _found(wanted: Wanted, contents: bool) -> Start:
    config = wanted.config
    output = Path(config.output)
    if config.resume == NEVER:
        check_output(output, overwrite=config.overwrite)
        return Start()
    if config.resume != AUTO:
        return _from_path(wanted, Path(config.resume), contents)
    folder = output / checkpoint_files.FOLDER
    story = _read_story(output / METRICS_FILE)
    if not checkpoint_files.named(folder) and story is None:
        check_output(output, overwrite=False)
        return Start(notes=(f"nothing to go on from in {output}; the run begins",))
    if story is not None and (finished := _finished(wanted, story)) is not None:
        return Start(finished=finished, notes=(f"the run in {output} is finished; there is nothing to do",))
    found, torn = checkpoint_files.newest(folder, contents=contents)
    if found is None and torn:
        raise ValueError(
            f"no checkpoint in {folder} is whole: {'; '.join(torn)}. Restore one from a copy, or begin anew with "
            "--overwrite and without --resume"
        )
    if found is not None:
        return _from_checkpoint(wanted, found, torn, story)
    assert story is not None
    if story.came_from is not None and Path(story.came_from).is_dir():
        # It went on from another folder's checkpoint and ended before it had one of its own.
        return _from_checkpoint(wanted, checkpoint_files.read(Path(story.came_from), contents=contents), [], story)
    check_settings(story.config, config, where=f"the run in {output}")
    told = f"the run in {output} ended after step {story.done} without a checkpoint; it begins again, its metrics too"
    return Start(notes=(told,))


def clear_leftovers(output: Path) -> list[str]:
    """Remove what killed runs have left half written; to be called while the folder is locked. Returns the names."""
    found = sorted(path for pattern in LEFTOVERS for path in output.glob(pattern))
    for path in found:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return [str(path.relative_to(output)) for path in found]


def _from_path(wanted: Wanted, path: Path, contents: bool) -> Start:
    """From a checkpoint, or the newest of a run, that is named."""
    output = Path(wanted.config.output)
    found, torn = checkpoint_files.at(path, contents=contents)
    if found is None:
        told = f": {'; '.join(torn)}" if torn else ""
        raise ValueError(f"resume is {str(path)!r}, which holds no whole checkpoint{told}")
    own = output / checkpoint_files.FOLDER
    if not (own.is_dir() and os.path.samefile(found.path.parent, own)):
        check_output(output, overwrite=wanted.config.overwrite)
        return _from_checkpoint(wanted, found, torn, None)
    later = [each.name for each in checkpoint_files.after(found.path.parent, found.step)]
    if later and not torn and not wanted.config.overwrite:
        raise ValueError(
            f"resume is {str(path)!r}, but {found.path.parent} has later ones ({', '.join(later[:3])}) that would be "
            "lost; pass --overwrite to drop them, or name another output folder"
        )
    return _from_checkpoint(wanted, found, torn, _read_story(output / METRICS_FILE))


def _from_checkpoint(wanted: Wanted, found: Checkpoint, torn: list[str], story: _Story | None) -> Start:
    where, facts = str(found.path), found.facts
    notes = [f"not whole, left out: {each}" for each in torn]
    notes += check_settings(facts["config"], wanted.config, where=where)
    check_data(facts["data"], wanted.data, where=where)
    check_length(facts["config"], facts["total"], wanted.config, wanted.total, found.step, where)
    notes += check_environment(facts["environment"], wanted.environment)
    told = f"the run goes on from step {found.step} of {wanted.total}, {where}"
    lost = 0 if story is None else story.done - found.step
    if lost > 0:
        steps = f"step {story.done} was" if lost == 1 else f"steps {found.step + 1} to {story.done} were"  # type: ignore[union-attr]
        told += f"; {steps} done after it and {'is' if lost == 1 else 'are'} run again"
    return Start(checkpoint=found, notes=(*notes, told))


def _finished(wanted: Wanted, story: _Story) -> TrainResult | None:
    """The result of a run of these settings that came to its end; None where there is something left to do."""
    config = wanted.config
    output = Path(config.output)
    if story.end is None or story.planned != wanted.total:
        return None
    if not any((output / name).is_file() for name in RESULTS):
        return None
    check_settings(story.config, config, where=f"the finished run in {output}")
    if story.data is not None:
        check_data(story.data, wanted.data, where=f"the finished run in {output}")
    values = story.end | {"losses": story.losses, "output": config.output}
    return TrainResult(**{field.name: _as_tuples(values[field.name]) for field in dataclasses.fields(TrainResult)})


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _read_story(path: Path) -> _Story | None:
    """None where there is no file, or none that a run wrote."""
    records = list(_records(path))
    first = next((record for record in records if record.get("kind") == "start"), None)
    if first is None or not isinstance(first.get("config"), dict):
        return None
    planned = [record["steps"] for record in records if record.get("kind") in ("start", "resumed")]
    steps = [record for record in records if record.get("kind") == "train"]
    came_from = [record.get("checkpoint") for record in records if record.get("kind") == "resumed"]
    last = records[-1]
    return _Story(
        config=first["config"],
        data=first.get("data"),
        planned=planned[-1],
        done=steps[-1]["step"] if steps else 0,
        losses=tuple(float("nan") if step["loss"] is None else step["loss"] for step in steps),
        end=last if last.get("kind") == "end" else None,
        came_from=came_from[-1] if came_from else None,
    )


def _records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file up to the first line that is not whole."""
    found: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                found.append(json.loads(line))
    except (OSError, ValueError):
        pass
    return found
