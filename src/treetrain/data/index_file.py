"""An index of rows as a file, so that a run that goes on does not read all of its data again."""

import dataclasses
import hashlib
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from treetrain.data.byte_ranges import FileState
from treetrain.data.columns import StoredColumns
from treetrain.data.prefix_order import PrefixOrder
from treetrain.data.row_index import RowIndex
from treetrain.data.row_maker import RowMaker

_VERSION = 1
_OWN = ("file", "offset", "line", "call", "digests", "advantage_digests")
_COLUMNS = tuple(field.name for field in dataclasses.fields(StoredColumns) if field.name != "given")


def index_key(files: list[FileState], maker: RowMaker) -> dict[str, Any]:
    """All that an index depends on: the files as they are, and how their rows are made."""
    return {
        "version": _VERSION,
        "files": [[os.path.abspath(file.path), file.path, file.size, file.changed] for file in files],
        "format": maker.format,
        "view": maker.view,
        "tools": maker.schemas,
        "limits": [maker.vocab_size, maker.max_positions],
        "tokenizer": _tokenizer_key(maker),
    }


def load_index(folder: Path, key: dict[str, Any]) -> RowIndex | None:
    """The index of a key; None where there is none, or none that is whole."""
    try:
        with np.load(_path(folder, key), allow_pickle=False) as stored:
            about = json.loads(bytes(stored["about"]))
            if about["key"] != json.loads(_text(key)):
                return None
            return _loaded({name: stored[name] for name in stored.files}, about)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def store_index(folder: Path, key: dict[str, Any], index: RowIndex) -> None:
    """Keep an index, in place of those of other keys. Raises OSError where the disk does not take it."""
    about = {
        "key": key,
        "files": [list(file) for file in index.files],
        "notes": index.notes,
        "format": index.format,
        "given": list(index.columns.given),
    }
    arrays = {f"row_{name}": getattr(index, name) for name in _OWN}
    arrays |= {f"column_{name}": getattr(index.columns, name) for name in _COLUMNS}
    arrays |= {f"given_{name}": values for name, values in index.columns.given.items()}
    arrays |= {"order_rows": index.order.rows, "order_shared": index.order.shared}
    path = _path(folder, key)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="writing-", delete=False) as file:
        try:
            np.savez(file, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            os.unlink(file.name)
            raise
    os.replace(file.name, path)  # in one step: a reader sees a whole index or none
    for other in folder.glob("index-*.npz"):
        if other != path:
            other.unlink(missing_ok=True)


def _loaded(arrays: dict[str, np.ndarray], about: dict[str, Any]) -> RowIndex:
    columns = StoredColumns(
        given={name: arrays[f"given_{name}"] for name in about["given"]},
        **{name: arrays[f"column_{name}"] for name in _COLUMNS},
    )
    return RowIndex(
        files=tuple(FileState(*file) for file in about["files"]),
        columns=columns,
        order=PrefixOrder(arrays["order_rows"], arrays["order_shared"]),
        notes=tuple(about["notes"]),
        format=about["format"],
        **{name: arrays[f"row_{name}"] for name in _OWN},
    )


def _path(folder: Path, key: dict[str, Any]) -> Path:
    return folder / f"index-{hashlib.sha256(_text(key)).hexdigest()[:16]}.npz"


def _text(key: dict[str, Any]) -> bytes:
    return json.dumps(key, sort_keys=True, default=repr).encode()


def _tokenizer_key(maker: RowMaker) -> Any:
    """What a tokenizer and its template do to a text, as far as they tell it themselves."""
    if maker.format != "chat" or maker.tokenizer is None:
        return None
    tokenizer = maker.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = repr(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    template = maker.renderer("").template or getattr(tokenizer, "chat_template", None)
    told = [type(tokenizer).__name__, vocabulary, str(template), tokenizer.special_tokens_map]
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
