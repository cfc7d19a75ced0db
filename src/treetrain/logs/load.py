"""Read logs into trajectories: detect the format, convert records to rows, and check that rows fit the model."""

import dataclasses
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.metadata import entry_points
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from treetrain.core.digest import digest
from treetrain.core.errors import DataError, expect, nearest, quoted, shortened
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.chat import IMAGE_KEYS, ChatReader, ChatRow, Conversation
from treetrain.logs.files import read_records
from treetrain.logs.formats import FORMATS
from treetrain.logs.formats.conversations import has_failed
from treetrain.logs.formats.tokens import trajectory_from_token_row
from treetrain.logs.log_images import ImageReader
from treetrain.logs.messages import clean_tools, read_tools
from treetrain.logs.once import Count, checked_count, count_once
from treetrain.logs.records import (
    CALL,
    EPISODE_KEYS,
    GROUP_KEYS,
    NO_TOOLS,
    Format,
    Notes,
    ReadSettings,
    Record,
    Tools,
    TrackedRecord,
    View,
    first_of,
    key_paths,
    look_up,
)

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Records = Iterator[tuple[str, Record | DataError]]
NOTHING = "no record holds messages or token ids"
OWN_FORMATS = "treetrain.formats"
"""The entry-point group of user-defined readers."""
PAGE_KEYS = {"data", "meta", "next_cursor", "nextCursor", "object", "has_more", "first_id", "last_id", "links"}
"""The keys of a page of an API that holds records under `data`."""
UNREAD_MEDIA = ("audios", "audio", "videos", "video")
MASKED = "mask_sample"
"""NeMo Gym's key of a rollout that is not to be trained."""
TOO_DEEP = "the record is nested too deeply to be read"
READ_TOGETHER = 1 << 20
"""Characters of conversations that are rendered together, and of texts that are tokenised in one call."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedFile:
    """The rows of one or more files, with remarks for the user."""

    trajectories: Sequence[Trajectory]
    """In file order; in the calls view the calls of a conversation are in order."""
    notes: tuple[str, ...]
    """Remarks on what was ignored or looks wrong, each once with a count and the first place."""
    format: str
    """The format that the files were read as."""
    skipped: tuple[str, ...] = ()
    """With `on_error="skip"`, one message for every record that was left out: where, and what is wrong."""


def load(
    path: Paths,
    *,
    tokenizer: object = None,
    format: str = "auto",
    view: View = "transcript",
    train: Literal["all", "last"] = "all",
    tools: Sequence[object] | str | os.PathLike[str] | None = None,
    chat_template: str | None = None,
    map: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
    images: Literal["refuse", "key"] = "refuse",
    on_error: Literal["stop", "skip"] = "stop",
    vocab_size: int | None = None,
    max_positions: int | None = None,
    limit: int | None = None,
    collect: Callable[[Iterator[Trajectory]], Sequence[Trajectory]] = list,
    count: Count = "per trajectory",
) -> LoadedFile:
    """Read logs of any of the formats in docs/data.md. A bad record raises an error unless `on_error` is "skip".

    Args:
        path: one file or folder, or several of one format: JSONL, JSON, Parquet or Arrow, plain or compressed.
        tokenizer: a transformers tokenizer, or a processor, which also prepares the images of conversations; not
            needed for formats that hold token ids.
        format: a name in docs/data.md, an entry point of the group `treetrain.formats`, or "auto": detected from the
            first record.
        view: one row per conversation ("transcript") or one row per LLM call ("calls").
        train: "last" trains only the last assistant message, as one call. Use it for logs with one LLM call per record,
            if their format does not say so.
        tools: tool schemas, or a JSON file of them, for conversations without their own; "none" leaves all tools out.
        chat_template: replaces the tokenizer's own: "chatml" (built in), a file, or the template's text.
        map: keys, and the path of the value of each in a record, e.g. `{"reward": "result.score"}`.
        where: paths in a call or its record, and the text of the value that the calls to be read have there, e.g.
            `{"model": "policy"}` in a trace with the calls of a judge.
        images: "key" replaces each image in a conversation by the text `<image>`, and keeps rows with different images
            apart. This is for inspecting such logs without a processor.
        on_error: "skip" leaves out records that cannot be used, and lists them in `LoadedFile.skipped`.
        vocab_size: reject token ids at or above this.
        max_positions: reject rows with more tokens than this.
        limit: read at most this many records over all files.
        collect: called with an iterator over the rows, returns those to keep; `list` keeps all. It may also have
            `wants(group, episode)`: False leaves a row out before it is checked and tokenised;
            `hear(remarks)`: called with the remarks on a record before its rows come;
            `apart`: True limits the notes to those on the record of the last row.
        count: "per trajectory" counts a trained token in every row that trains it; "once" in the first of them only, by
            a weight of 0 in the others. Rows with an `episode` are compared within it, others with each other.

    Raises:
        DataError: a file or record that cannot be used; the message names file, line and field, and what to do.
    """
    paths: list[Any] = list(path) if isinstance(path, list | tuple) else [path]
    for each in paths:
        expect("path", each, (str, os.PathLike), "a file, a folder, or a list of them (rows: tt.from_messages)")
    if not paths:
        raise DataError("no file given; pass at least one file")
    expect("map", map or {}, Mapping, "a dictionary such as {'reward': 'result.score'}")
    schemas = _tools_of(tools)
    settings = _settings(tokenizer, view=view, train=train, tools=schemas, chat_template=chat_template, images=images)
    reading = _Reading(settings, map or {}, on_error, where or {}, count, format, limit, vocab_size, max_positions)
    reading.notes.apart = getattr(collect, "apart", False)
    found = (found for path in paths for found in read_records(path, reading.notes))
    reading.hear = getattr(collect, "hear", None)
    return reading.finished(collect(reading.rows(found, f"{paths[0]}: {NOTHING}", getattr(collect, "wants", None))))


def _settings(tokenizer: Any, *, chat_template: str | None, images: Any = "refuse", **others: Any) -> ReadSettings:
    """The settings; a processor becomes its tokenizer, and a reader of images."""
    reader = None
    if hasattr(tokenizer, "image_processor") and hasattr(tokenizer, "tokenizer"):
        reader = ImageReader(tokenizer) if images == "refuse" else None
        chat_template = chat_template or getattr(tokenizer, "chat_template", None)
        tokenizer = tokenizer.tokenizer
    return ReadSettings(tokenizer=tokenizer, chat_template=chat_template, images=images, image_reader=reader, **others)


def _tools_of(tools: Sequence[object] | str | os.PathLike[str] | None) -> Tools | Literal["none"]:
    if tools == NO_TOOLS:
        return NO_TOOLS
    return read_tools(Path(tools)) if isinstance(tools, str | os.PathLike) else clean_tools(tools)


def from_messages(
    rows: Iterable[object],
    *,
    tokenizer: object = None,
    format: str = "auto",
    view: View = "transcript",
    train: Literal["all", "last"] = "all",
    tools: Sequence[object] | str | os.PathLike[str] | None = None,
    chat_template: str | None = None,
    map: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    count: Count = "per trajectory",
) -> LoadedFile:
    """Read rows in memory: a list or a `datasets.Dataset` of records, or a list of conversations.

    Args:
        rows: records of any format that `load` reads, or lists of messages.
        tokenizer: this and `format`, `view`, `train`, `tools`, `chat_template`, `map`, `where`, `on_error` and `count`
            are as in `load`.

    Raises:
        DataError: a row that cannot be used; the message names its number and field.
    """
    settings = _settings(tokenizer, view=view, train=train, tools=_tools_of(tools), chat_template=chat_template)

    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        expect("rows", rows, (), "a list of records or of conversations (files: tt.load)")

    def records() -> Iterator[tuple[str, Record | DataError]]:
        for number, row in enumerate(rows):
            record: Any = {"messages": row} if isinstance(row, list) else row
            if hasattr(record, "non_tensor_batch"):  # verl's DataProto
                record = {"batch": dict(record.batch.items()), "non_tensor_batch": record.non_tensor_batch}
            bad = DataError(f"the row is {quoted(row)}, expected a list of messages or an object")
            yield f"row {number}", record if isinstance(record, Mapping) else bad

    reading = _Reading(settings, map or {}, on_error, where or {}, count, format)
    return reading.finished(list(reading.rows(records(), f"row 0: no rows were given, or {NOTHING}")))


def detect_format(
    path: str | os.PathLike[str], format: str = "auto", map: Mapping[str, str] | None = None
) -> tuple[Format, str]:
    """Detect the format of a file; also returns the reason, empty for a given format and for treetrain's own.

    Raises:
        DataError: the file cannot be read, or its first record is of no known format.
        ValueError: there is no format of this name.
    """
    if format != "auto":
        return _named(format), ""
    if (first := next(_records(read_records(path), Notes()), None)) is None:
        raise DataError(f"{path}: {NOTHING}")
    return _detect(first, format, map)


def _records(found: Records, notes: Notes) -> Records:
    """The records, and of pages of an API the records in them."""
    for place, record in found:
        first = next(iter(record.values()), None) if isinstance(record, Mapping) else None
        if isinstance(first, Mapping) and "model_patch" in first:
            notes.add("a file of predictions (preds.json) holds patches and no messages", place)
            continue
        if isinstance(record, DataError) or not isinstance(record.get("data"), list) or record.keys() - PAGE_KEYS:
            if not isinstance(record, DataError) and has_failed(record):
                notes.add("an error in the place of an answer is no row", place)
                continue
            yield place, record
            continue
        for number, one in enumerate(record["data"]):
            bad = DataError(f"`data.{number}` is {quoted(one)}, expected an object")
            yield f"{place} data.{number}", one if isinstance(one, Mapping) else bad


def _named(name: str) -> Format:
    known = {kind.name: kind for kind in FORMATS}
    if name in known:
        return known[name]
    own = entry_points(group=OWN_FORMATS)
    if name not in own.names:
        raise ValueError(f"unknown format {name!r}; {nearest(name, ('auto', *known, *sorted(own.names)))}")
    reader = own[name].load()
    return Format(name, "", lambda record, notes: reader(record))


def _detect(first: tuple[str, Record | DataError], format: str, map: Mapping[str, str] | None) -> tuple[Format, str]:
    if format != "auto":
        return _named(format), ""
    place, record = first
    if isinstance(record, DataError):
        raise DataError(f"{place}: {record}; the format is detected from this record: name it (format, --format)")
    record = _mapped(record, map or {}, Notes())
    for kind in FORMATS:
        try:
            found = kind.found_in(record)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        if found:
            own = kind.name in ("tokens", "chat")
            return kind, "" if own else f"read as {kind.name}: the first record has {found}"
    raise DataError(f"{place}: cannot tell the format: {_described(record)}")


def _described(record: Record) -> str:
    keys = list(dict.fromkeys(key_paths(record)))
    parts = {part for path in keys for part in path.split(".")}
    near = [kind.name for kind in FORMATS if kind.comes_near(parts)]
    path = next((key.removesuffix(".0.role") for key in keys if key.endswith(".0.role")), "...")
    names = f" (--format; near: {', '.join(near)})" if near else " (--format, see docs/data.md)"
    return (
        f"the record has {shortened(', '.join(keys) or 'no keys', 150)}; name the format{names}, or the path of what "
        f"we read (--map messages={path} or --map input_ids=...)"
    )


def _sessions(records: Records, session: Callable[[str, Record], Hashable]) -> Records:
    """The events of every session as one record. A session that is named by a text ends where another begins."""
    held: dict[Hashable, tuple[str, list[Record]]] = {}
    for place, record in records:
        if isinstance(record, DataError) or (name := session(place, record)) is None:
            yield place, record
            continue
        if isinstance(name, str) and name not in held:
            yield from ((where, {"records": found}) for where, found in held.values())
            held = {}
        name = name if isinstance(name, str) else (repr(name),)
        held.setdefault(name, (place, []))[1].append(record)
    yield from ((where, {"records": found}) for where, found in held.values())


def _mapped(record: Record, map: Mapping[str, str], notes: Notes) -> Record:
    if not map:
        return record
    changed = {name: value for name, value in record.items() if name not in map.values()}
    for name, path in map.items():
        value = record[path] if path in record else look_up(record, path)
        if value is None:
            notes.add(f"`{path}`, to be read as `{name}`, is not there")
        else:
            changed[name] = value
    return changed


@dataclasses.dataclass(slots=True)
class _Found:
    """A record as it was read."""

    place: str
    rows: Sequence[Trajectory | ChatRow | Conversation] | DataError
    """Its rows, or what is wrong with it."""
    remarks: list[str] | None
    """The remarks on it, if they are heard."""
    masks: str
    """Where its loss weights come from."""

    def __len__(self) -> int:
        return 0 if isinstance(self.rows, DataError) else sum(map(len, self.rows))


@dataclasses.dataclass
class _Reading:
    """One pass over records."""

    settings: ReadSettings
    map: Mapping[str, str]
    on_error: str
    where: Mapping[str, str]
    count: Count
    format: str
    limit: int | None = None
    vocab_size: int | None = None
    max_positions: int | None = None
    notes: Notes = dataclasses.field(default_factory=Notes)
    skipped: list[str] = dataclasses.field(default_factory=list)
    records: int = 0
    made: int = 0
    first: tuple[str, Record] = ("", {})
    """The first record that could be read, and its place."""
    hear: Callable[[tuple[str, ...]], None] | None = None
    """See `load`."""

    def __post_init__(self) -> None:
        checked_count(self.count)
        for name, value, known in (
            ("view", self.settings.view, ("transcript", "calls")),
            ("train", self.settings.train, ("all", "last")),
            ("images", self.settings.images, ("refuse", "key")),
            ("on_error", self.on_error, ("stop", "skip")),
        ):
            if value not in known:
                raise ValueError(f"{name} {value!r} is neither {known[0]!r} nor {known[1]!r}")

    @cached_property
    def chat(self) -> ChatReader:
        """Made for the first conversation: token rows need no tokenizer."""
        return ChatReader(self.settings)

    def finished(self, rows: Sequence[Trajectory]) -> LoadedFile:
        """The rows with all remarks on them."""
        if self.count == "once":
            rows = count_once(rows, notes=self.notes)
        skipped = tuple(self.skipped)
        return LoadedFile(trajectories=rows, notes=self.notes.lines(), format=self.kind.name, skipped=skipped)

    def rows(
        self, found: Records, nothing: str, wants: Callable[[Hashable, Hashable], bool] | None = None
    ) -> Iterator[Trajectory]:
        """The trajectories of all records, in order; see `load` for `wants`. `nothing`: the error if there are none."""
        notes, records = self.notes, _records(found, self.notes)
        if (first := next(records, None)) is None:
            raise DataError(nothing)
        self.kind, why = _detect(first, self.format, self.map)
        if why:
            notes.add(why, None)
        self.wants, records = wants, chain([first], records)
        records = _sessions(records, self.kind.session) if self.kind.session else records
        yield from self._made(islice(records, None if self.limit is None else max(self.limit, 0)))
        if self.records == self.limit and next(records, None) is not None:
            notes.add(f"only the first {self.limit} records are read; there are more", None)
        if self.records == 0:
            raise DataError(f"no rows were read (limit {self.limit}); give a limit of at least 1 or none")
        if not self.made:
            why = [note for note in notes.lines() if not note.startswith(("keys", "message keys"))][-1:]
            why = shortened("; ".join([f"skipped: {one}" for one in self.skipped[:1]] or why))
            place, first = self.first
            raise DataError(
                f"{place}: no rows in {self.records} records, read as {self.kind.name} ({why}); {_described(first)}"
            )
        if self.skipped:
            notes.add(f"{len(self.skipped)} of {self.records} records are skipped; the first: {self.skipped[0]}", None)
        given = (self.settings.view, self.settings.train, self.settings.chat_template, self.settings.tools)
        if self.kind.tokens and given != ("transcript", "all", None, None):
            notes.add("the rows are token ids already: view, train, chat template and tools have no effect", None)

    def _made(self, records: Records) -> Iterator[Trajectory]:
        """The trajectories of records; many conversations are rendered and tokenised together."""
        made = self._tokenised if self.kind.tokens else self._rendered
        pending: list[_Found] = []
        size = 0
        for self.records, (place, record) in enumerate(records, 1):
            self.notes.place, self.notes.masks = place, ""
            self.notes.record = None if self.hear is None else []
            if self.notes.apart:
                self.notes.clear()
            rows = record if isinstance(record, DataError) else self._rows(record)
            if self.notes.apart and self.notes.masks:
                self.notes.add(f"what is trained: {self.notes.masks}")
            found = _Found(place, rows, self.notes.record, self.notes.masks)
            pending.append(found)
            size += len(found)
            if size > READ_TOGETHER or isinstance(rows, DataError) or self.notes.apart:
                yield from made(pending)
                pending, size = [], 0
        yield from made(pending)

    def _rendered(self, pending: list[_Found]) -> Iterator[Trajectory]:
        """The trajectories of records, whose conversations are rendered while their rows are made."""
        asked = [
            [request for row in found.rows if isinstance(row, Conversation) for request in row.requests]
            for found in pending
            if not isinstance(found.rows, DataError)
        ]
        try:
            texts = self.chat.renderer.render_ahead(asked) if any(asked) else iter([[] for _ in asked])
        except RecursionError:  # one of them is nested too deeply to be sent
            if len(pending) > 1:
                yield from chain.from_iterable(self._rendered([found]) for found in pending)
                return
            texts = iter([[DataError(TOO_DEEP)]])
        ready: list[_Found] = []
        size = 0
        for found in pending:
            if not isinstance(found.rows, DataError):
                self.notes.place, self.notes.record = found.place, found.remarks
                following = iter(next(texts))
                try:
                    found.rows = [
                        made
                        for row in found.rows
                        for made in (
                            self.chat.rows(row, following, self.notes) if isinstance(row, Conversation) else [row]
                        )
                    ]
                except DataError as error:
                    found.rows = error
                except RecursionError:
                    found.rows = DataError(TOO_DEEP)
            ready.append(found)
            size += len(found)
            if size > READ_TOGETHER or isinstance(found.rows, DataError):
                yield from self._tokenised(ready)
                ready, size = [], 0
        yield from self._tokenised(ready)

    def _tokenised(self, pending: list[_Found]) -> Iterator[Trajectory]:
        """The trajectories of rows; errors are raised or listed in the order of the records."""
        rows = (row for found in pending if not isinstance(found.rows, DataError) for row in found.rows)
        if texts := [row for row in rows if isinstance(row, ChatRow)]:
            self.chat.renderer.encode_ahead(texts)
        for found in pending:
            self.notes.place, self.notes.record = found.place, found.remarks
            try:
                if isinstance(found.rows, DataError):
                    raise found.rows
                self.made += len(found.rows)
                made: list[Trajectory] = []
                for row in found.rows:
                    assert not isinstance(row, Conversation)  # it has been rendered
                    made.append(self.chat.renderer.tokenised(row, self.notes) if isinstance(row, ChatRow) else row)
                    self._check(made[-1])
            except DataError as error:
                message = str(error) if found.place in str(error) else f"{found.place}: {error}"
                if self.on_error == "stop":
                    raise DataError(message) from error
                self.skipped.append(message)
            else:
                if self.hear is not None:
                    masks = [f"what is trained: {found.masks}"] if found.masks else []
                    self.hear(tuple(dict.fromkeys([*(found.remarks or ()), *masks])))
                yield from made

    def _check(self, row: Trajectory) -> None:
        if self.vocab_size is not None and len(row) and row.ids.max() >= self.vocab_size:
            at = int(row.ids.argmax())
            raise DataError(
                f"ids[{at}] = {row.ids[at]} is outside the model's vocabulary of {self.vocab_size} tokens; "
                "the rows were made for another model: pass that model, or its tokenizer"
            )
        if self.max_positions is not None and len(row) > self.max_positions:
            raise DataError(
                f"row {quoted(row.id)} has {len(row)} tokens, the model has {self.max_positions} positions; "
                "rows are never cut or dropped for you: shorten it, take it out, or use a longer model"
            )

    def _rows(self, record: Record) -> list[Trajectory | ChatRow | Conversation] | DataError:
        """The rows of a record, or what is wrong with it."""
        self.first = self.first if self.first[1] else (self.notes.place, record)
        made: list[Trajectory | ChatRow | Conversation] = []
        mapped = _mapped(record, self.map, self.notes)
        # The rows of this format are the records, whose keys are checked there.
        tracked = None if self.kind.name == "tokens" else TrackedRecord(mapped)
        if mapped.get(MASKED) is True:
            self.notes.add(f"a record with `{MASKED}` is no row")
            return made
        try:
            for row in map(self._with_image_key, self._converted(mapped if tracked is None else tracked)):
                if self.where and not self._is_wanted(row, record):
                    continue
                row = {name: value for name, value in row.items() if name != CALL} if CALL in row else row
                if self.wants is not None and not self.wants(first_of(row, *GROUP_KEYS), first_of(row, *EPISODE_KEYS)):
                    self.made += 1
                elif self.kind.tokens or row.get("input_ids") is not None:
                    made.append(token_row := trajectory_from_token_row(row, self.notes))
                    if self.kind.name != "tokens" and token_row.loss_weights is not None:  # the keys are ours
                        self.notes.masks = "the tokens of the answers, as the log has them"
                else:
                    made.append(self.chat.prepared(row, self.notes))
            if tracked is not None:
                unread = tracked.unread()
                if self.kind.session:
                    unread = ((name.removeprefix("records."), value) for name, value in unread)
                self.notes.unused_keys(unread)
        except DataError as error:
            return error
        except RecursionError:
            return DataError(TOO_DEEP)
        return made

    def _is_wanted(self, row: Record, record: Record) -> bool:
        """Whether a row has the values of `where`, by itself, in what its call has, or in its record."""
        for path, wanted in self.where.items():
            found = (look_up(one, path) for one in (row, row.get(CALL), record))
            value = next((value for value in found if value is not None), None)
            if str(value) != wanted:
                self.notes.add(f"a row is left out: its `{path}` is {quoted(value)}, not {wanted!r}")
                return False
        return True

    def _with_image_key(self, row: Record) -> Record:
        """Add a digest of a row's images to its key, or raise DataError if images are refused."""
        for name in UNREAD_MEDIA:
            if row.get(name):
                raise DataError(f"the record has `{name}`, which the model saw and which are not read; take it out")
        images = [row[name] for name in IMAGE_KEYS if row.get(name)]
        if not images:
            return row
        if self.settings.image_reader is not None and "messages" in row:
            return row
        if self.settings.images == "refuse":
            raise DataError(
                "the record has images, which in Python a processor as the tokenizer prepares in conversations; "
                "--images key keeps rows with different images apart, to inspect them"
            )
        key = digest(repr(images))
        rest = {name: value for name, value in row.items() if name not in IMAGE_KEYS}
        return rest | {"key": key if row.get("key") is None else f"{row['key']} {key}"}

    def _converted(self, record: Record) -> list[Record]:
        """The rows of a record. A record can hold anything, so every error of a reader becomes a DataError."""
        said = self.notes.total
        try:
            rows = list(self.kind.convert(record, self.notes))
        except DataError:
            raise
        except Exception as error:  # readers may be the user's own
            raise DataError(
                f"the record is not as format {self.kind.name} has them ({type(error).__name__}: {shortened(error)})"
            ) from error
        if not rows and self.notes.total == said:
            self.notes.add("the record has no rows")
        for row in rows:
            if not isinstance(row, Mapping) or not any(name in row for name in ("input_ids", "messages", "completion")):
                raise DataError(f"no `input_ids` or `messages` in the row {quoted(row)} of format {self.kind.name}")
        return rows
