"""The rows of a run: in memory where they fit, else indexed once and read step by step."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from treetrain.data.byte_ranges import FileState
from treetrain.data.exchange import Exchange
from treetrain.data.index_file import index_key, load_index, store_index
from treetrain.data.jsonl import is_gzipped, read_jsonl, reading
from treetrain.data.lazy_rows import LazyRows, RowStore, take
from treetrain.data.load import no_file
from treetrain.data.row_index import RowIndex, build_index
from treetrain.data.row_maker import RowMaker, format_of
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError
from treetrain.train.batches import Int64s
from treetrain.train.rows import ReadRows, RowSource, read_rows, reading_options

if TYPE_CHECKING:
    from treetrain.train.config import TrainConfig

FOLDER = ".rows"
"""Within the output folder: the index, and while it is made the sorted tokens."""
GROWTH = {"transcript": 3, "calls": 24}
"""Bytes in memory for a byte of a file, by view: 12 bytes per token of 4 to 10; calls repeat what came before."""
GZIP_RATIO = 5
SHARE_OF_FREE = 0.5
TOKEN_BYTES = 40
"""Of a row in memory: ids, weights, and a few facts."""
_AT_ONCE = 4096


def read_rows_of_run(config: "TrainConfig", source: RowSource, ranks: Exchange) -> ReadRows:
    """The training rows, where `data_in_memory` wants them.

    Args:
        config: of the run.
        source: how its files are read.
        ranks: the processes of the run; each indexes a share of the files. In memory each has all rows.

    Raises:
        DataError: see `read_rows`; and files that cannot be read from anywhere. RanksDisagree on the other processes.
    """
    if not config.data:
        raise no_file()
    lazy, note = _decision(config, ranks)
    if lazy:
        read = _lazy_rows(config.data, source, Path(config.output) / FOLDER, ranks)
    else:
        read, _ = ranks.agree("reading the rows", lambda: (read_rows(config.data, source), None))
    return ReadRows(rows=read.rows, notes=(*read.notes, *note), format=read.format, tokenizer=read.tokenizer)


def subset(rows: Sequence[Trajectory], numbers: Int64s) -> Sequence[Trajectory]:
    """Some of the rows, given ascending, where they are."""
    if isinstance(rows, LazyRows):
        return rows.subset(numbers)
    return [rows[number] for number in numbers.tolist()]


def in_memory(rows: Sequence[Trajectory], numbers: Int64s, ranks: Exchange) -> list[Trajectory]:
    """Some of the rows; of rows in files the processes ask for the same ones together.

    Raises:
        DataError: rows of files that would take more memory than is free.
    """
    if not isinstance(rows, LazyRows):
        return [rows[number] for number in numbers.tolist()]
    needed = TOKEN_BYTES * int(rows.columns.tokens[numbers].sum()) * _ranks_here(ranks)
    free = min(ranks.agree("looking at the free memory", lambda: (None, _free_bytes()))[1])
    if needed > SHARE_OF_FREE * free:
        raise DataError(
            f"the {len(numbers)} held-out rows are kept in memory and would take about {_gib(needed)}, of which "
            f"{_gib(free)} are free; hold out fewer (eval_fraction), or give eval_data"
        )
    pieces = [numbers[at : at + _AT_ONCE] for at in range(0, len(numbers), _AT_ONCE)]
    return [row for piece in pieces for row in take(rows, piece.tolist())]


def _decision(config: "TrainConfig", ranks: Exchange) -> tuple[bool, tuple[str, ...]]:
    """Whether the rows stay in their files, the same on all processes; and what the user should know of it."""
    if config.data_in_memory != "auto":
        return not config.data_in_memory, ()

    def looked() -> tuple[None, tuple[int, float, list[str]]]:
        zipped = [path for path in config.data if is_gzipped(path)]
        size = 0
        for path in config.data:
            with reading(path):
                size += os.path.getsize(path) * (GZIP_RATIO if path in zipped else 1)
        return None, (size * GROWTH[config.view], _free_bytes(), zipped)

    told = ranks.agree("looking at the data files", looked)[1]
    needed, _, zipped = told[0]
    needed, free = needed * _ranks_here(ranks), min(free for _, free, _ in told)
    if needed <= SHARE_OF_FREE * free:
        return False, ()
    about = f"about {_gib(needed)} in memory, of which {_gib(free)} are free"
    if zipped:
        return False, (f"the rows may take {about}; unpack {zipped[0]}, so that they can stay in their files",)
    return True, (f"the rows stay in their files and are read step by step: they would take {about}",)


def _lazy_rows(files: Sequence[str], source: RowSource, folder: Path, ranks: Exchange) -> ReadRows:
    maker, states = ranks.agree("looking at the data files", lambda: (_maker(files, source), None))[0]
    assert maker.format is not None
    key = index_key(states, maker)

    def stored() -> tuple[RowIndex | None, bool]:
        found = load_index(folder, key)
        return found, found is not None

    index, found = ranks.agree("looking for an index of the rows", stored)
    note: tuple[str, ...] = ()
    if index is None or not all(found):
        index = _built(files, maker, folder, ranks)
        if ranks.rank == 0:
            try:
                store_index(folder, key, index)
            except OSError as error:
                note = (f"the index of the rows could not be kept, and is made again when the run goes on: {error}",)
    rows = LazyRows.all_of(RowStore(index, maker, ranks))
    return ReadRows(rows=rows, notes=(*index.notes, *note), format=index.format, tokenizer=maker.tokenizer)


def _maker(files: Sequence[str], source: RowSource) -> tuple[RowMaker, list[FileState]]:
    states = [FileState.of(path) for path in files]
    maker = RowMaker(**reading_options(files, source))
    if maker.format is None:
        line, row = next(read_jsonl(files[0]))
        maker.format = format_of(row, f"{files[0]} line {line}")
    return maker, states


def _built(files: Sequence[str], maker: RowMaker, folder: Path, ranks: Exchange) -> RowIndex:
    try:
        return build_index(files, maker, folder=folder, exchange=ranks)
    except OSError as error:
        raise DataError(
            f"the rows are to stay in their files, but sorting them in {folder} fails ({error}); make room there (4 "
            "bytes per token of rows without a group), let all processes see that folder, or give data_in_memory true"
        ) from error


def _ranks_here(ranks: Exchange) -> int:
    """Processes that share this machine's memory: torchrun tells how many; else all of them."""
    return min(int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size)), ranks.size)


def _free_bytes() -> float:
    """Infinite where the system does not tell."""
    import torch

    from treetrain.engine.free_bytes import free_bytes

    try:
        return free_bytes(torch.device("cpu"))
    except OSError:
        return math.inf


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
