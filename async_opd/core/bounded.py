"""A dict of bounded size that forgets the keys that were set longest ago."""

from __future__ import annotations

from collections import UserDict
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedDict(UserDict[Key, Value]):
    """At most ``most`` entries: setting one more key removes the key that was set longest ago.

    Setting a key again makes it the newest. Iteration goes from the oldest key to the newest.
    """

    def __init__(self, most: int) -> None:
        """ValueError for fewer than one entry."""
        if most < 1:
            raise ValueError(f"a bounded dict needs room for an entry, found {most}")
        super().__init__()
        self.most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        self.data.pop(key, None)
        self.data[key] = value
        if len(self.data) > self.most:
            del self.data[next(iter(self.data))]
