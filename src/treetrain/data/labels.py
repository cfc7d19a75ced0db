"""Names of groups, pairs and episodes as numbers of fixed size, so that an index of any file has the same columns."""

import hashlib
from collections.abc import Hashable

DIGEST_BYTES = 16
NO_LABEL = bytes(DIGEST_BYTES)
"""Of None."""


def label_digest(label: Hashable) -> bytes:
    """Equal for labels that are equal in Python (1, 1.0 and True are one label); 16 bytes, zeros for None alone.

    Two of 10**9 different labels have the same digest with a probability below 10**-20.
    """
    if label is None:
        return NO_LABEL
    return hashlib.blake2b(_canonical(label), digest_size=DIGEST_BYTES).digest()


def _canonical(label: Hashable) -> bytes:
    if isinstance(label, str):
        return b"s" + label.encode("utf-8", "surrogatepass")
    if isinstance(label, int | float):  # bool is an int
        whole = isinstance(label, int) or label.is_integer()
        return b"n" + repr(int(label) if whole else label).encode()
    if isinstance(label, tuple):
        return b"t" + b"".join(label_digest(part) for part in label)
    return type(label).__qualname__.encode() + repr(label).encode()
