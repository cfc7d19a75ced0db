"""Whether a run may go on from what another has left: same settings where they matter, same rows in the same order."""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from treetrain.train.config import TrainConfig
from treetrain.train.digest import rows_digest
from treetrain.train.prepare import Prepared
from treetrain.train.schedules import make_schedule

FREE = frozenset(
    {
        "output",
        "overwrite",
        "report",
        "tensorboard",
        "wandb",
        "resume",
        "checkpoint_every_minutes",
        "checkpoint_every_steps",
        "keep_checkpoints",
    }
)
"""Settings that say where and how often things are read and written; the steps do not depend on them."""
BY_CONTENT = frozenset(
    {"data", "eval_data", "format", "view", "tools", "chat_template", "tokenizer", "eval_fraction", "model"}
)
"""Settings that may be said in another way (a file that was moved) as long as the same rows and weights come of it."""
ROUNDING = frozenset(
    {"execution", "budget", "tokens_per_call", "gradient_checkpointing", "device", "threads"}
    | {"parallel", "reduce", "replicas", "cpu_offload", "meta_init"}
)
"""Settings that change the order of sums and nothing else."""
LENGTH = frozenset({"epochs", "steps"})
"""Settings that may change as long as the steps that are done would have been the same."""

RANKS = "ranks"
"""The entry of an environment that tells over how many processes the run is spread; none: one."""

_NO_SETTING = "no such setting"


def data_digests(prepared: Prepared) -> dict[str, str]:
    """SHA-256 of what decides a run's steps besides its settings: training rows, held-out rows, order of the rows.

    The order depends on numpy's random numbers, which may be others in another version.
    """
    order = prepared.plan.epoch(0)
    return {
        "rows": rows_digest(prepared.rows),
        "eval_rows": rows_digest(prepared.eval_rows),
        "order": _digest(array for rows in (order, prepared.eval_steps) for array in _with_lengths(rows)),
    }


def check_settings(then: Mapping[str, Any], now: TrainConfig, *, where: str) -> list[str]:
    """Compare the settings of the run that is gone on from with those of now.

    Args:
        then: as `TrainConfig.as_dict` gave them.
        where: what is gone on from, for the message.

    Returns:
        Remarks on differences that are allowed and that the user should know.

    Raises:
        ValueError: every setting that differs and must not, with both values.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    current = now.as_dict()
    pairs = {name: (then.get(name, defaults.get(name)), current[name]) for name in current}
    pairs |= {name: (value, _NO_SETTING) for name, value in then.items() if name not in current and value is not None}
    differing = {name: pair for name, pair in pairs.items() if _plain(pair[0]) != _plain(pair[1])}
    refused = [name for name in differing if name not in FREE | BY_CONTENT | ROUNDING | LENGTH]
    if refused:
        told = "; ".join(f"{name} was {differing[name][0]!r} and is now {differing[name][1]!r}" for name in refused)
        raise ValueError(
            f"cannot go on from {where}: {told}. Give the former {'value' if len(refused) == 1 else 'values'}, or "
            "begin a run of its own in another output folder"
        )
    rounded = [f"{name} was {then.get(name)!r}, is {current[name]!r}" for name in differing if name in ROUNDING]
    if not rounded:
        return []
    return [f"not bit for bit as without the interruption, but within rounding: {'; '.join(rounded)}"]


def check_data(then: Mapping[str, str], now: Mapping[str, str], *, where: str) -> None:
    """Raise ValueError where the rows, or their order, are not those of the run that is gone on from."""
    words = {
        "rows": "the training rows are not the same: a file, the tokenizer or the chat template has changed",
        "eval_rows": "the held-out rows are not the same: a file, the tokenizer or the chat template has changed",
        "order": "the rows are the same, but their order over the steps is not: it comes from another version",
    }
    for name, told in words.items():
        if then[name] != now[name]:
            raise ValueError(f"cannot go on from {where}: {told}. Give what it had, or begin a run of its own")


def check_length(then: Mapping[str, Any], then_total: int, now: TrainConfig, total: int, step: int, where: str) -> None:
    """Check that a run of another length would have been the same up to `step`.

    Raises:
        ValueError: it ends before that step, or its learning rates would have been others.
    """
    if total < step:
        raise ValueError(f"cannot go on from {where}: it is at step {step}, and the run is to end after {total}")
    if total == then_total:
        return
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    before = TrainConfig(**{name: value for name, value in then.items() if name in known})
    rates = zip(_lr_factors(before, then_total, step), _lr_factors(now, total, step), strict=True)
    for number, (one, other) in enumerate(rates, start=1):
        if one != other:
            raise ValueError(
                f"cannot go on from {where}: it was to have {then_total} steps, now {total}, and with the schedule "
                f"{now.schedule!r} that changes the learning rate from step {number} on, which is done. Give the "
                "former steps or epochs; schedules that do not know the end so early (constant) can be lengthened"
            )


def check_environment(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Remarks on what differs outside the settings: versions, machine, number of ranks."""
    then, now = ({RANKS: 1, **each} for each in (then, now))
    names = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
    changed = [f"{name} was {then.get(name)}, is {now.get(name)}" for name in names]
    if not changed:
        return []
    return [f"not bit for bit as without the interruption, but within rounding: {'; '.join(changed)}"]


def _lr_factors(config: TrainConfig, total: int, count: int) -> list[float]:
    schedule = make_schedule(torch.optim.SGD([torch.zeros(1)], lr=1.0), config, total)
    return [float(schedule.lr_lambdas[0](step)) for step in range(count)]


def _with_lengths(arrays: Sequence[Any]) -> list[Any]:
    return [[len(array) for array in arrays], *arrays]


def _digest(parts: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(np.ascontiguousarray(part).tobytes())
        else:
            digest.update(repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
