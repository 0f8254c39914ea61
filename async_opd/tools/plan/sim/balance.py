"""The replica with the fewest outstanding tokens: ``teachers.balancer`` without time."""

from __future__ import annotations

import heapq
from itertools import count


class SimulatedBalancer:
    """Reservations on replicas. Of replicas with equal tokens the one changed first is taken."""

    def __init__(self, replicas: int, capacity: int) -> None:
        """Each of ``replicas`` has at most ``capacity`` reservations at a time."""
        self.free = replicas * capacity
        """Reservations that are free."""
        self._capacity = capacity
        self._tokens = [0] * replicas
        self._taken = [0] * replicas
        self._turns = list(range(replicas))  # the turn of each replica's one valid entry
        self._next_turn = count(replicas)
        self._order = [(0, turn, turn) for turn in range(replicas)]  # (tokens, turn, replica)

    def take(self, tokens: int) -> int:
        """Reserves the replica with the fewest outstanding tokens; one must be free."""
        while True:
            _, turn, replica = heapq.heappop(self._order)
            if turn == self._turns[replica]:
                self._change(replica, 1, tokens)
                return replica

    def give_back(self, replica: int, tokens: int) -> None:
        """Ends a reservation."""
        self._change(replica, -1, -tokens)

    def _change(self, replica: int, reservations: int, tokens: int) -> None:
        self._taken[replica] += reservations
        self._tokens[replica] += tokens
        self.free -= reservations
        self._turns[replica] = turn = next(self._next_turn)
        if self._taken[replica] < self._capacity:
            heapq.heappush(self._order, (self._tokens[replica], turn, replica))
