"""Lines of files by where they begin, so that several processes read disjoint lines and one line is found again."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from treetrain.data.jsonl import BYTE_ORDER_MARK, is_gzipped, reading
from treetrain.errors import DataError

_BLOCK = 1 << 20


class FileState(NamedTuple):
    """A file as it was when it was read."""

    path: str
    """As the user named it."""
    size: int
    """Bytes."""
    changed: int
    """When it was written last, in nanoseconds."""

    @classmethod
    def of(cls, path: str) -> "FileState":
        """Raises DataError for a file that is not there, or whose lines cannot be found by where they begin."""
        with reading(path):
            found = Path(path).stat()
        if is_gzipped(path):
            raise DataError(
                f"{path} is gzipped, so that no line can be read without all before it: unpack it, or keep all rows "
                "in memory (data_in_memory true)"
            )
        return cls(path, found.st_size, found.st_mtime_ns)

    def check(self) -> None:
        """Raise DataError where it is another file now."""
        with reading(self.path):
            found = Path(self.path).stat()
        if (found.st_size, found.st_mtime_ns) != (self.size, self.changed):
            raise DataError(
                f"{self.path} has changed while it is being trained on: it had {self.size} bytes and has "
                f"{found.st_size}, or was written to since; leave the file alone, and begin again"
            )


class Range(NamedTuple):
    """Those lines of a file that begin at bytes begin to end - 1."""

    file: int
    """Number of the file."""
    begin: int
    end: int


def ranges_of(sizes: Sequence[int], rank: int, ranks: int) -> list[Range]:
    """The share of one of several processes: about equal bytes of all files, one after the other."""
    total = sum(sizes)
    low, high = total * rank // ranks, total * (rank + 1) // ranks
    found, at = [], 0
    for file, size in enumerate(sizes):
        begin, end = max(low - at, 0), min(high - at, size)
        if begin < end:
            found.append(Range(file, begin, end))
        at += size
    return found


def count_lines(path: str, part: Range) -> int:
    """How many lines begin within a range."""
    count = int(part.begin == 0)
    with reading(path), open(path, "rb", buffering=0) as file:
        # A line begins behind every line feed.
        at, stop = max(part.begin - 1, 0), part.end - 1
        file.seek(at)
        while at < stop and (block := file.read(min(_BLOCK, stop - at))):
            count += block.count(b"\n")
            at += len(block)
    return count


def lines_of(path: str, part: Range) -> Iterator[tuple[int, bytes]]:
    """(byte at which it begins, line) of every line that begins within a range."""
    with reading(path), open(path, "rb") as file:
        at = 0
        if part.begin:
            file.seek(part.begin - 1)
            at = part.begin - 1 + len(file.readline())
        while at < part.end and (line := file.readline()):
            yield at, line.removeprefix(BYTE_ORDER_MARK) if at == 0 else line
            at += len(line)


def line_at(path: str, offset: int) -> bytes:
    """The line that begins at a byte."""
    with reading(path), open(path, "rb") as file:
        file.seek(offset)
        return file.readline().removeprefix(BYTE_ORDER_MARK) if offset == 0 else file.readline()
