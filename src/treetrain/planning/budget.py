"""Budgets as users write them: a number of tokens, or bytes with a unit."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

_UNITS = {"b": 1} | {
    f"{letter}{ending}": base ** (power + 1)
    for power, letter in enumerate("kmgt")
    for ending, base in (("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(e\+?[0-9]{1,2})?\s*([a-z]+)")


@dataclass(frozen=True, slots=True)
class Bytes:
    """A number of bytes."""

    count: int

    def __str__(self) -> str:
        size, unit = float(self.count), "B"
        for larger in ("KiB", "MiB", "GiB", "TiB"):
            if size < 1024:
                break
            size, unit = size / 1024, larger
        return f"{self.count} B" if unit == "B" else f"{size:.1f} {unit}"


def parse_budget(value: Any) -> int | Bytes | None:
    """What a budget means.

    Args:
        value: a whole number of tokens (also as text, "4096"), bytes as text with a unit ("8GiB", "1.5 GB", "2e9B";
            KiB MiB GiB TiB count in 1024, KB MB GB TB in 1000), Bytes, or None for no choice.

    Raises:
        ValueError: anything else, or less than 1.
    """
    if value is None or isinstance(value, Bytes):
        found = value
    elif isinstance(value, int | np.integer) and not isinstance(value, bool):
        found = int(value)
    elif isinstance(value, str):
        found = _parse_text(value)
    else:
        raise _refused(value)
    if found is not None and (found.count if isinstance(found, Bytes) else found) < 1:
        raise _refused(value)
    return found


def _parse_text(value: str) -> int | Bytes:
    text = value.strip().lower()
    if re.fullmatch("[0-9]+", text):
        return int(text)
    match = _SIZE.fullmatch(text)
    if match is None or match[3] not in _UNITS:
        raise _refused(value)
    return Bytes(int(float(match[1] + (match[2] or "")) * _UNITS[match[3]]))


def _refused(value: Any) -> ValueError:
    return ValueError(
        f"budget={value!r}: give a whole number of tokens from 1 (4096), or bytes with a unit: B, KiB, MiB, GiB, TiB, "
        'KB, MB, GB or TB ("8GiB", "900 MB")'
    )
