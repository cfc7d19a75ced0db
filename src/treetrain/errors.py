"""The errors a user can cause. Each message names the place, what is wrong, both values and what to do."""

import reprlib

_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxstring, _repr.maxother = 3, 60, 60


def quoted(value: object) -> str:
    """A value for a message: its repr, cut to a readable length however long or deeply nested it is."""
    return shortened(_repr.repr(value), 80)


def shortened(text: object, length: int = 160) -> str:
    """A text for a message, such as that of another error, which may quote a value whole."""
    text = str(text)
    return text if len(text) <= length else text[: length - 3] + "..."


class DataError(ValueError):
    """Input data that cannot be trained on as it is: a broken line, lengths that disagree, an id out of range."""


class UnsupportedModel(ValueError):
    """A model, or a setting of one, whose gradients would not be exact on a tree. Raised before any work is done."""


class RanksDisagree(RuntimeError):
    """Processes that should make the same step do not, or one of them could not; raised on every rank."""
