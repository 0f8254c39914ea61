"""The driver's part of a consistent cut: its accounts at one moment between two optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from async_opd.accounting.dead_letters import DeadLettersState
from async_opd.accounting.guardrail import GuardrailState
from async_opd.accounting.ledger import LedgerState


@dataclass(frozen=True)
class Cut:
    """The driver's part: one moment between two optimizer steps.

    A sample is trained (counted in ``ledger``), or in flight; of the latter the trainer's files
    hold those that are scored. ``cursor`` is the position in the prompt stream, ``admitted`` what
    counts against the budget, ``files`` the sizes of the run directory's append-only files.
    """

    step: int
    version: int
    cursor: int
    admitted: int
    ledger: LedgerState
    dead_letters: DeadLettersState = field(default_factory=DeadLettersState)
    guardrail: GuardrailState = field(default_factory=GuardrailState)
    files: dict[str, int] = field(default_factory=dict)
