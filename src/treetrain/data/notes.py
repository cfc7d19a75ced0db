"""What a reader tells the user without stopping: each thing once, with a count and the first place."""

from collections.abc import Iterable


class Notes:
    """Remarks collected while reading; the same remark from many rows becomes one line."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def add(self, text: str, place: str = "") -> None:
        self._first.setdefault(text, place)
        self._count[text] = self._count.get(text, 0) + 1

    def add_all(self, texts: Iterable[str]) -> None:
        """Remarks about no place."""
        for text in texts:
            self.add(text)

    def lines(self) -> tuple[str, ...]:
        return tuple(self._line(text) for text in self._count)

    def _line(self, text: str) -> str:
        count, first = self._count[text], self._first[text]
        if not first:
            return text
        return f"{text} ({first})" if count == 1 else f"{text} ({count} times, first: {first})"
