"""The interface of formats, and the fields of records.

A format is one function that turns a record of a log into rows of our own two forms: token rows (`input_ids`) and
conversations (`messages`). `files` reads the records. `load` detects the format, makes trajectories of the rows, and
adds file and line to every error.
"""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from typing import Literal, TypeVar

from treetrain.core.errors import DataError, quoted
from treetrain.logs.columns import Json
from treetrain.logs.log_images import ImageReader

Kind = TypeVar("Kind", str, list[Json], dict[str, Json])
View = Literal["transcript", "calls"]
Tools = list[dict[str, Json]] | None
NO_TOOLS: Literal["none"] = "none"
"""In place of tools: those of the conversations are left out."""
Record = Mapping[str, Json]

GROUP_KEYS = ("group_id", "group", "task_id")
EPISODE_KEYS = ("episode_id", "episode")
ROW_KEYS = ("reward", "id", "pair", "chosen", "key", *GROUP_KEYS, *EPISODE_KEYS)
"""Facts of a whole row, in token rows and conversations."""
FACT_KEYS = (*ROW_KEYS, "trial")
CONTAINERS = 1 << 20
"""A record with more lists and objects is an error."""
LISTED = 20
"""Keys that are not used are named up to this many."""
TELLING = re.compile("mask|loss|weight|train|label|system|reward|resolved|score", re.IGNORECASE)
"""Keys whose names may say what is trained; they are named apart where they are not used."""
TOKENS = re.compile("token(?!_?(count|usage))", re.IGNORECASE)
"""Such keys, too, if they have a list: a number is a count, as in `usage`."""
OFFERED = {"resolved": "reward", "success": "reward", "score": "reward", "instance_id": "group"}
"""Keys of whole records that are not read by themselves, and as what --map reads them."""
CALL = "(call)"
"""In rows of LLM calls: what the log has on the call, for `where`. It is taken out before the row is read."""


class Notes:
    """Remarks for the user, none an error; the same remark from many records becomes one line."""

    def __init__(self, place: str = "") -> None:
        self.place = place
        """File and line of the current record."""
        self.apart = False
        """Whether remarks are those on the current record, and say where its loss weights come from."""
        self.masks = ""
        """Where the loss weights of the current record come from."""
        self.record: list[str] | None = None
        """The remarks on the current record, if they are kept."""
        self._count: dict[str, int] = {}
        self._first: dict[str, str] = {}
        self._unused: dict[str, Counter[str]] = {}
        self._lists: set[str] = set()
        """Keys among the unused ones that have a list."""

    def clear(self) -> None:
        """Forget all remarks."""
        for remarks in (self._count, self._first, self._unused, self._lists):
            remarks.clear()

    def add(self, text: str, where: str | None = "") -> None:
        """Add a remark on the current record; `where` names a part of it, None means no record."""
        self._first.setdefault(text, "" if where is None else f"{self.place} {where}".strip())
        self._count[text] = self._count.get(text, 0) + 1
        if self.record is not None and where is not None:
            self.record.append(text)

    @property
    def total(self) -> int:
        """The number of remarks, each as often as it was made."""
        return sum(self._count.values())

    def unused_keys(self, values: Iterable[tuple[str, Json]], of: str = "keys") -> None:
        """Remark on keys that no reader has used, and their values; all of one kind (`of`) become one line."""
        for name, value in values:
            if self.record is not None:
                self.record.append(f"{of.removesuffix('s')} that is not used: {name[-80:]!r}")
            self._unused.setdefault(of, Counter())[name] += 1
            self._first.setdefault(of, self.place)
            if isinstance(value, list) or (isinstance(value, str) and value.startswith("[")):
                self._lists.add(name)

    def lines(self) -> tuple[str, ...]:
        """One line per remark, with its count and the first place."""
        lines = []
        for text, count in self._count.items():
            first = self._short(text)
            times = "" if count == 1 else f"{count} times, first: "
            lines.append(f"{text} ({times}{first})" if first else text)
        for of, names in self._unused.items():
            ordered = sorted(names.items(), key=lambda each: each[0].count("."))  # those at the top come first
            telling = [(name, count) for name, count in ordered if self._tells(name, of)]
            if telling:
                listed = ", ".join(f"{name[-80:]!r} ({count})" for name, count in telling[:LISTED])
                more = f" and {len(telling) - LISTED} more" if len(telling) > LISTED else ""
                offered = [f"{OFFERED[name]}={name}" for name, _ in telling if of == "keys" and name in OFFERED]
                one = "one" if offered else "one as a key that this format has"
                cure = f"--map {' or '.join(offered) or 'KEY=PATH'} reads {one}; first: {self._short(of)}"
                lines.append(f"{of} that may say what to train and are not used: {listed}{more}; {cure}")
            if rest := len(names) - len(telling):
                such = next(name for name, count in ordered if (name, count) not in telling)
                lines.append(f"{of} that are not used: {rest}, such as {such[-80:]!r}; first: {self._short(of)}")
        return tuple(lines)

    def _tells(self, name: str, of: str) -> bool:
        """Whether a key that is not used may say what is trained, or has a fact of the row."""
        last = name.rpartition(".")[2]
        is_list = name in self._lists
        return (of == "keys" and name in OFFERED) or bool(TELLING.search(last) or (is_list and TOKENS.search(last)))

    def _short(self, text: str) -> str:
        """The first place of a remark without the folders of its file."""
        folders, _, name = self._first[text].rpartition("/")
        return f".../{name}" if folders else name


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReadSettings:
    """How records become rows; see `load` for each field."""

    tokenizer: object = None
    view: View = "transcript"
    tools: Tools | Literal["none"] = None
    chat_template: str | None = None
    train: Literal["all", "last"] = "all"
    images: Literal["refuse", "key"] = "refuse"
    image_reader: ImageReader | None = None
    """Prepares the images of conversations."""


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """A kind of record."""

    name: str
    keys: str
    """The paths that a record of this format has, such as `eval samples | messages epoch`: two ways to recognise it."""
    convert: Callable[[Record, Notes], Iterable[Record]]
    """Turns a record into token rows and conversations. Raises DataError without the place; `load` adds it."""
    matches: Callable[[Record], bool] | None = None
    """Whether a record is of this format, where `keys` do not say it."""
    tokens: bool = False
    """Whether all of its rows are token ids already, so that no tokenizer is needed."""
    session: Callable[[str, Record], Hashable] | None = None
    """For logs of events: the session that a record belongs to, from its place and content. The records of a session
    are converted together, as `records` of one record. None: the record stands alone."""

    def comes_near(self, names: set[str]) -> bool:
        """Whether a record with these keys has two thirds of those that this format is recognised by."""
        if self.matches is not None:
            return not names.isdisjoint(re.findall(r"`(\w+)`", self.keys))
        ways = ([key.split(".")[-1] for key in keys.split()] for keys in self.keys.split("|"))
        return any(3 * len(set(keys) - names) <= len(keys) for keys in ways)

    def found_in(self, record: Record) -> str | None:
        """The keys that a record is recognised by, in words; None if it is not of this format."""
        if self.matches is not None and not self.matches(record):
            return None
        for keys in map(str.split, self.keys.split("|")):
            if self.matches is not None or all(key in record or look_up(record, key) is not None for key in keys):
                return " and ".join(f"`{key}`" for key in keys) if self.matches is None else self.keys
        return None


class TrackedRecord(dict[str, Json]):
    """A record that knows which of its keys were read. The objects in it become tracked when they are read."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Json:
        value = super().__getitem__(name)
        if name not in self.read:
            self.read.add(name)
            super().__setitem__(name, value := value if name in WHOLE else _tracked(value))
        return value

    def get(self, name: str, default: Json = None) -> Json:
        """The value of a key, which counts as read."""
        return default if name not in self else self[name]  # noqa: SIM401

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # because of this method `dict(record)` reads every key with `record[name]`

    def items(self) -> Json:
        """All keys and values, which count as read."""
        return dict(self).items()

    def values(self) -> Json:
        """All values, which count as read."""
        return dict(self).values()

    def __or__(self, other: Json) -> Json:
        """A copy with other values; a key that is read in it counts as read here."""
        for name, value in super().items():
            super().__setitem__(name, value if name in self.read or name in WHOLE else _tracked(value))
        both = TrackedRecord({**dict(super().items()), **other})
        both.read = self.read
        return both

    def unread(self, above: str = "") -> Iterator[tuple[str, Json]]:
        """The paths of keys that were not read, without list positions and repeated names, and their values.

        An object of which no key was read was taken as a whole. Names with digits are `*` in paths: they may be ids.
        """
        for name, value in super().items():
            if name not in self.read:
                yield from () if value is None or (above and name in WIRE) else ((f"{above}{name}", value),)
                continue
            part = "*." if re.search(r"\d", name) else f"{name}."
            path = above if above.endswith(part) else above + part
            pending = [value]
            while pending:
                one = pending.pop()
                one = one.found if isinstance(one, JsonText) else one
                if isinstance(one, TrackedRecord) and one.read:
                    yield from one.unread(path)
                pending += one[::-1] if isinstance(one, list) and one and not isinstance(one[0], int | float) else []


def unknown(record: Record, known: Container[str]) -> Iterator[tuple[str, Json]]:
    """The keys that are not known, and their values."""
    return ((name, value) for name in record if name not in known and (value := record[name]) is not None)


class JsonText(str):
    """Text of a tracked record that may hold JSON, which is parsed once."""

    found: Json = None
    """The list or object in it, tracked, once it is parsed."""


WIRE = frozenset(("type", "index", "object", "signature"))
"""Keys of inner objects that describe how a message was sent, not what was said."""
WHOLE = frozenset(("tools", "functions", "tool_defs", "tool_definitions", "function_tools"))
"""Keys whose values are not ours to read: schemas of tools, written as they are."""


def _tracked(value: Json) -> Json:
    if isinstance(value, Mapping):
        return value if isinstance(value, TrackedRecord) else TrackedRecord(value)
    if isinstance(value, list) and value and not isinstance(value[0], int | float):
        return [_tracked(one) for one in value]
    return JsonText(value) if isinstance(value, str) and value.lstrip().startswith(("[", "{")) else value


# Fields of records


def look_up(record: Json, path: str) -> Json:
    """The value at a path of keys and list positions, such as `response.choices.0`; None if it is not there.

    JSON text on the way is parsed, and a key may hold the dots of the rest of the path itself.
    """
    names = path.split(".")
    for at, name in enumerate(names):
        record = parsed(record) if at else record
        if isinstance(record, Mapping):
            if at + 1 < len(names) and (rest := ".".join(names[at:])) in record:
                return record[rest]
            record = record.get(name)
        elif isinstance(record, list) and name.isdigit():
            record = record[int(name)] if int(name) < len(record) else None
        else:
            return None
    return record


def first_path(record: Json, *paths: str) -> Json:
    """The value at the first of these paths that is there; None if none is."""
    return next((value for path in paths if (value := look_up(record, path)) is not None), None)


def picked(record: Json, **paths: str | tuple[str, ...]) -> dict[str, Json]:
    """The facts that a record has: for each name the value at the first of its paths that is there."""
    found = {name: first_path(record, *((one,) if isinstance(one, str) else one)) for name, one in paths.items()}
    return {name: value for name, value in found.items() if value is not None}


def key_paths(value: Json, above: str = "") -> Iterator[str]:
    """The paths of the values in a record, of the first entry of every list; attributes of OTLP by their names."""
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        if value[0].keys() == {"key", "value"}:
            yield from (f"{above}{look_up(entry, 'key')}" for entry in value)
        else:
            yield from key_paths(value[0], f"{above}0.")
    elif isinstance(value, Mapping) and value and above.count(".") < 8:
        for name, entry in value.items():
            yield from key_paths(entry, f"{above}{name}.")
    else:
        yield above[:-1]


def field(record: Json, path: str, kind: type[Kind]) -> Kind:
    """The value at `path`, which must be of this kind. JSON text is parsed where a list or an object is expected.

    Raises:
        DataError: names the path, what was expected and what was found.
    """
    value = look_up(record, path)
    try:
        value = value if kind is str else parsed(value, strict=True)
    except DataError as error:
        raise DataError(f"`{path}`: {error}") from error
    if not isinstance(value, kind):
        found = "missing" if value is None else f"{quoted(value)}"
        names = {str: "text", list: "a list", dict: "an object"}
        raise DataError(f"`{path}` is {found}, expected {names[kind]}")
    return value


def objects(record: Json, path: str) -> list[dict[str, Json]]:
    """The list of objects at `path`; an empty list if there is none. Raises DataError for anything else."""
    if look_up(record, path) is None:
        return []
    values = field(record, path, list)
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            raise DataError(f"`{path}.{number}` is {quoted(value)}, expected an object")
    return values


def parsed(value: Json, *, strict: bool = False) -> Json:
    """Parse text that holds a JSON list or object, as tracing tools store them; other values stay as they are.

    Text in which an object has a key twice stays text too; with `strict` it raises DataError.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        if not isinstance(value, JsonText):
            return parse_json(value)
        value.found = _tracked(parse_json(value)) if value.found is None else value.found
        return value.found
    except (ValueError, RecursionError) as error:
        if strict and isinstance(error, DataError):
            raise
        return value


def parse_json(text: str) -> Json:
    """Parse JSON.

    Raises:
        DataError: an object that has a key twice, of which Python would keep the last; too many lists and objects.
        ValueError: broken JSON.
    """
    if has_many_containers(text):
        check_containers(text)
    return DECODER.decode(text)


def has_many_containers(text: str) -> bool:
    """Whether a text has more brackets than a value may have lists and objects."""
    return text.count("{") + text.count("[") > CONTAINERS


def check_containers(text: str, start: int = 0) -> None:
    """Raise DataError if the JSON value at `start` has too many lists and objects: `{}` takes 100 times its bytes."""
    depth = count = 0
    for found in _BRACKET_OR_STRING.finditer(text, start):
        mark = text[found.start()]
        depth += (mark in "[{") - (mark in "]}")
        count += mark in "[{"
        if count > CONTAINERS:
            raise DataError(f"the record has more than {CONTAINERS:,} lists and objects; write smaller records")
        if depth == 0 and mark != '"':
            return


def _unique_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    record = dict(pairs)
    if len(record) < len(pairs):
        first: dict[str, Json] = {}
        for name, value in pairs:
            if name in first:
                raise DataError(
                    f"an object has the key {quoted(name)} twice, with {quoted(first[name])} and {quoted(value)}; keep "
                    "one of them"
                )
            first[name] = value
    return record


_BRACKET_OR_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]', re.DOTALL)
DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)


def facts(record: Record, *also: Record) -> dict[str, Json]:
    """The facts of a row that a record has under our names; those of the first record that has them."""
    return {name: one[name] for one in (*also[::-1], record) for name in FACT_KEYS if look_up(one, name) is not None}


def row_facts(row: Record, notes: Notes) -> dict[str, Json]:
    """Facts of the whole row as arguments of `Trajectory`; a row without an id is named by its place."""
    found = {name: row.get(name) for name in ("reward", "pair", "chosen", "key", "id")}
    found["id"] = notes.place if found["id"] is None else found["id"]
    return found | {"group": first_of(row, *GROUP_KEYS), "episode": first_of(row, *EPISODE_KEYS)}


def first_of(record: Record, *names: str) -> Json:
    """The value of the first of these keys that is present and not null."""
    for name in names:  # a loop: rows come in millions
        if (value := record.get(name)) is not None:
            return value
    return None


def without_nulls(value: Json) -> Json:
    """Drop null entries of objects: a table's columns give every object every key that any row has."""
    if isinstance(value, dict):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list) and isinstance(next((entry for entry in value if entry is not None), None), dict | list):
        return [without_nulls(entry) for entry in value]
    return value
