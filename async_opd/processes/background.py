"""Work that may block, done by a separate thread from a bounded queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def each_of(work: Callable[[Item], Result], items: Iterable[Item], at_once: int) -> list[Result]:
    """The result of ``work`` for each item, in order, of so many threads; raises the first error.

    After an error no other item is begun. The threads end with the process even while ``work``
    blocks: those of a ThreadPoolExecutor would do all items before the process ends.
    """
    left, found = list(enumerate(items))[::-1], dict[int, Result]()
    errors: list[BaseException] = []

    def take() -> None:
        while not errors:
            try:
                at, item = left.pop()
            except IndexError:
                return
            try:
                found[at] = work(item)
            except BaseException as error:
                errors.append(error)

    count = min(at_once, len(left))
    threads = [threading.Thread(target=take, name="each of", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[at] for at in range(len(found))]


class BackgroundWorker(Generic[Item]):
    """Calls ``work`` with the waiting items, in order; ``put`` never waits.

    ``max_size`` bounds the sum of ``size`` over the items that are not yet done; a larger item is
    accepted when no other waits. The thread ends with the process even while ``work`` blocks.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[list[Item]], None],
        max_size: int,
        size: Callable[[Item], int] = lambda item: 1,
    ) -> None:
        self._name = name
        self._work = work
        self._max_size = max_size
        self._size = size
        self._items: list[Item] = []
        self._waiting = 0
        self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        """The sum of ``size`` over the items that are not yet done."""
        return self._waiting

    def put(self, item: Item) -> bool:
        """Whether there was room for the item. Raises the error that ended the work, if any."""
        with self._changed:
            self._check()
            size = self._size(item)
            if self._closed or (self._waiting and self._waiting + size > self._max_size):
                return False
            self._items.append(item)
            self._waiting += size
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()
        return True

    def close(self, timeout_s: float) -> bool:
        """Accepts no more items; whether all are done within the time. Raises as ``put`` does."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._check()
        return self._waiting == 0

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._closed)
                items, self._items = self._items, []
            if not items:
                return
            try:
                self._work(items)
            except Exception as error:
                self._error = error
                return
            with self._changed:
                self._waiting -= sum(map(self._size, items))
