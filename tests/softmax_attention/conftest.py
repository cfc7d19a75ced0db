"""Settings of this folder."""

from support.threads import one_thread

__all__ = ["one_thread"]
