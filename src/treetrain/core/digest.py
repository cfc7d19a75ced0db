"""A short name for content, equal in every process. Python's own hash is not."""

from hashlib import sha256


def digest(content: str | bytes) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of a content."""
    return sha256(content if isinstance(content, bytes) else content.encode("utf-8", "replace")).hexdigest()[:16]
