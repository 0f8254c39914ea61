"""A dict of bounded size that forgets the keys that were set longest ago."""

from __future__ import annotations

from collections import UserDict
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedDict(UserDict[Key, Value]):
    """At most ``max_size`` entries: setting one more removes the key that was set longest ago.

    Setting a key again makes it the newest. Iteration goes from the oldest key to the newest.
    """

    def __init__(self, max_size: int) -> None:
        """ValueError for fewer than one entry."""
        if max_size < 1:
            raise ValueError(f"a bounded dict needs a size of at least 1, found {max_size}")
        super().__init__()
        self.max_size = max_size

    def __setitem__(self, key: Key, value: Value) -> None:
        self.data.pop(key, None)
        self.data[key] = value
        if len(self.data) > self.max_size:
            del self.data[next(iter(self.data))]
