"""Numbers that no other process gives: of leases, orders and events, which outlive a restart."""

from __future__ import annotations

from secrets import randbits


class Numbers:
    """Consecutive numbers from a random one on: a clock may be behind that of an earlier process.

    Those of two processes are the same with a probability of about 1 in 10**10.
    """

    def __init__(self) -> None:
        self._first = self.next = randbits(62)  # the sums stay within 63 bits

    def take(self) -> int:
        """The next number."""
        self.next += 1
        return self.next - 1

    def __contains__(self, number: int) -> bool:
        """Whether it was given here, or is the next one."""
        return self._first <= number <= self.next
