"""Errors that a user can cause. Each message says where, what is wrong, both values and what to do."""

import difflib
import reprlib
from collections.abc import Iterable

_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxstring, _repr.maxother = 3, 60, 60


def quoted(value: object) -> str:
    """The repr of a value for a message, cut to a readable length."""
    return shortened(_repr.repr(value), 80)


def shortened(text: object, length: int = 160) -> str:
    """Cut a text for a message, such as another error's message, which may quote a long value."""
    text = str(text)
    return text if len(text) <= length else text[: length - 3] + "..."


def printable(text: object) -> str:
    """A text with control characters as escapes: names in files could make a terminal hide or fake what it shows."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(
        one if one in "\n\t" or one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )


class _Printable(Exception):
    """An error whose message may quote what others have written."""

    def __str__(self) -> str:
        return printable(super().__str__())


def nearest(name: object, known: Iterable[str]) -> str:
    """Say which name was probably meant, or which names there are."""
    wrong, names = str(name).lower(), {each.lower(): each for each in known}
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.7)
    close = close or [each for each in names if len(wrong) > 3 and wrong in each]
    if close:
        return f"did you mean {names[close[0]]}?"
    return f"known: {shortened(', '.join(names.values()), 200)}"


def expect(name: str, value: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Raise TypeError unless the value of an argument is of one of these types."""
    if not isinstance(value, kinds):
        shown = f"{quoted(value)}, " if isinstance(value, str | int | float) else ""
        raise TypeError(f"{name} is {shown}a {type(value).__name__}; give {wanted}")


class DataError(_Printable, ValueError):
    """Input data that cannot be used for training: a broken line, lengths that disagree, an id out of range."""


class UnsupportedModel(_Printable, ValueError):
    """A model, or a setting of one, whose gradients would not be exact on a tree. Raised before any work is done."""


class RanksDisagree(_Printable, RuntimeError):
    """The ranks do not run the same step, or one of them failed; raised on every rank."""
