"""The replica with the fewest outstanding tokens: ``teachers.balancer`` without time."""

from __future__ import annotations

import heapq
from itertools import count


class SimulatedBalancer:
    """Places on replicas, by number. Of equals the one that has been so for longest is taken."""

    def __init__(self, replicas: int, places: int) -> None:
        """``places`` pieces of work at a time on each of ``replicas``."""
        self.free = replicas * places
        """Places that are free."""
        self._places = places
        self._tokens = [0] * replicas
        self._taken = [0] * replicas
        self._turns = list(range(replicas))  # of the one valid entry of each
        self._next_turn = count(replicas)
        self._order = [(0, turn, turn) for turn in range(replicas)]  # (tokens, turn, replica)

    def take(self, tokens: int) -> int:
        """A place on the replica with the fewest outstanding tokens; one must be free."""
        while True:
            _, turn, replica = heapq.heappop(self._order)
            if turn == self._turns[replica]:
                self._change(replica, 1, tokens)
                return replica

    def give_back(self, replica: int, tokens: int) -> None:
        """The work is done."""
        self._change(replica, -1, -tokens)

    def _change(self, replica: int, places: int, tokens: int) -> None:
        self._taken[replica] += places
        self._tokens[replica] += tokens
        self.free -= places
        self._turns[replica] = turn = next(self._next_turn)
        if self._taken[replica] < self._places:
            heapq.heappush(self._order, (self._tokens[replica], turn, replica))
