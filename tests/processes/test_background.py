"""Work on threads: in order, at most so many at once, and the process ends though one hangs."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from async_opd.processes.background import each_of


def test_results_come_in_order_and_so_many_items_are_worked_on_at_once() -> None:
    assert each_of(lambda n: n * n, range(9), 3) == [n * n for n in range(9)]
    assert each_of(str, [], 3) == []
    together = threading.Barrier(3)
    each_of(lambda _: together.wait(20), range(3), 3)


def test_after_an_error_no_other_item_is_begun() -> None:
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        raise PermissionError(f"no quota for {item}")

    with pytest.raises(PermissionError, match="no quota for 0"):
        each_of(work, range(9), 1)
    assert begun == [0]


ENDS = """
import threading
from async_opd.processes.background import each_of
begun = threading.Event()
def hang(item):
    begun.set()
    threading.Event().wait(60)
threading.Thread(target=each_of, args=(hang, range(4), 2), daemon=True).start()
begun.wait(20)
"""


def test_a_process_ends_while_items_hang() -> None:
    subprocess.run([sys.executable, "-c", ENDS], timeout=30, check=True)
