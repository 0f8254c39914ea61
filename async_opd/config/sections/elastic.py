"""Pools whose number of engines follows the cluster: ``replicas: {min: 2, max: 8}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PlainSerializer, PlainValidator

MOST = 1 << 31


@dataclass(frozen=True)
class Elastic:
    """``min`` engines are what a run needs to start; up to ``max`` it takes what is free."""

    min: int
    max: int

    def __str__(self) -> str:
        return f"{self.min}–{self.max}"


def _valid(given: Any, fewest: int) -> int | Elastic:
    """A number from ``fewest`` on, or a range of such numbers that is not empty."""
    if isinstance(given, Elastic):
        return given
    expected = f"a number from {fewest} on, or {{min: 2, max: 8}}"
    if not isinstance(given, Mapping):
        return _count(given, fewest, expected)
    faults = [f"{name!r} is not a key here" for name in given if name not in ("min", "max")]
    found = {}
    for name in ("min", "max"):
        try:
            found[name] = _count(given.get(name), 1, f"{name}: a number from 1 on")
        except ValueError as fault:
            faults.append(str(fault))
    if len(found) == 2 and found["max"] < found["min"]:
        faults.append(f"max: at least min ({found['min']})")
    if faults:
        raise ValueError(f"{expected}; {'; '.join(faults)}")
    return Elastic(**found)


def _count(given: Any, fewest: int, expected: str) -> int:
    number = int(given) if isinstance(given, float) and given.is_integer() else given
    if type(number) is not int or not fewest <= number < MOST:
        raise ValueError(expected)
    return number


_AS_GIVEN = PlainSerializer(lambda found: found if type(found) is int else asdict(found))

Replicas = Annotated[int | Elastic, PlainValidator(lambda given: _valid(given, 1)), _AS_GIVEN]
"""The engines of a pool."""
ReplicasOrNone = Annotated[int | Elastic, PlainValidator(lambda given: _valid(given, 0)), _AS_GIVEN]
"""The same, of a pool that need not be there."""


class Pooled:
    """A section with ``replicas``."""

    if TYPE_CHECKING:

        @property
        def replicas(self) -> int | Elastic: ...

    @property
    def min_replicas(self) -> int:
        """Engines without which a run does not start."""
        return self.replicas.min if isinstance(self.replicas, Elastic) else self.replicas

    @property
    def max_replicas(self) -> int:
        """Engines that a run has at most."""
        return self.replicas.max if isinstance(self.replicas, Elastic) else self.replicas
