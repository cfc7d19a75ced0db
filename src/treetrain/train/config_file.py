"""A run's settings in a TOML file: keys are named as the flags are; tables are the sections of `--help`, and free."""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

from treetrain.train.checks import allows_none, check_setting
from treetrain.train.config import NO_SETTINGS, TrainConfig
from treetrain.train.settings import SECTIONS

NONE = "None"  # TOML has no null; the flags say it by this word too
SECTION_OF = {field.name: title for title, kind in SECTIONS.items() for field in dataclasses.fields(kind)}
"""The section of every setting."""


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings that a file gives, each checked by itself; not what it leaves to the defaults.

    Raises:
        ValueError: a file that cannot be read, an unknown table or key, a key that is given twice, a bad value; with
            the file, the key, the value and what is allowed.
    """
    settings: dict[str, Any] = {}
    for name, value in _read(Path(path)).items():
        if isinstance(value, dict):
            _check_table(path, name, value)
            entries = value
        else:
            entries = {name: value}
        for key, entry in entries.items():
            if key in settings:
                raise ValueError(f"{path}: {key} is given twice, in a table and outside; give it once")
            settings[key] = _checked(path, key, entry)
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no TOML: it is not UTF-8 ({error})") from error
    except OSError as error:
        raise ValueError(f"config file {path} cannot be read: {error.strerror}") from error


def _check_table(path: str | Path, title: str, entries: dict[str, Any]) -> None:
    if title not in SECTIONS:
        raise ValueError(f"{path}: unknown table [{title}]; there are {', '.join(SECTIONS)}, and none is needed")
    for key in entries:
        if SECTION_OF.get(key, title) != title:
            raise ValueError(
                f"{path}: {key} stands in [{title}], but belongs to [{SECTION_OF[key]}] or above all tables"
            )


def _checked(path: str | Path, key: str, value: Any) -> Any:
    if key in NO_SETTINGS:
        raise ValueError(f"{path}: {key} is an option of a loss, but no setting of a run: {NO_SETTINGS[key]}")
    if key not in SECTION_OF:
        raise ValueError(f"{path}: unknown setting {key} = {value!r}{_like(key)}")
    if value == NONE and allows_none(key):
        return None
    try:
        check_setting(key, value)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return tuple(value) if isinstance(value, list) else value


def _like(key: str) -> str:
    import difflib

    near = difflib.get_close_matches(key.replace("-", "_"), SECTION_OF, n=1)
    return f"; is {near[0]} meant?" if near else f"; there are {', '.join(SECTION_OF)}"


def settings_as_toml(config: TrainConfig) -> str:
    """All settings of a run as a file that `read_settings` gives back unchanged."""
    lines = ["# Every setting of the run. treetrain train --config THIS_FILE --output FOLDER runs it again."]
    values = {field.name: (getattr(config, field.name), field.default) for field in dataclasses.fields(TrainConfig)}
    for title, kind in SECTIONS.items():
        lines += ["", f"[{title}]"]
        for field in dataclasses.fields(kind):
            value, default = values[field.name]
            if value is not None:
                lines.append(f"{field.name} = {_toml(value)}")
            elif default is not None:
                lines.append(f'{field.name} = "{NONE}"')
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A string, number, truth value or list of strings as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    return f"[{', '.join(_toml(entry) for entry in value)}]"
