"""The status of samples: from the journal and the dead letters of a run directory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from async_opd.accounting.audit import AuditError, journal_entries
from async_opd.accounting.journal import LEDGER
from async_opd.tools.report.recorded_run import RecordedRun


def sample_status(run: RecordedRun, uids: Collection[str]) -> dict[str, str]:
    """A sentence on each of these samples: trained, dead-lettered, in flight, or never admitted."""
    wanted = set(uids)
    admitted: set[str] = set()
    steps: defaultdict[str, list[int]] = defaultdict(list)
    try:
        for entry in journal_entries(run.folder / LEDGER):
            admitted |= wanted.intersection(entry.get("admitted", ()))
            for uid in wanted.intersection(entry.get("trained", ())):
                steps[uid].append(int(entry.get("step", 0)))
    except AuditError as error:
        return dict.fromkeys(wanted, f"unknown: {error}")
    letters = {one.uid: f"dead letter of {one.stage}: {one.reason}" for one in run.dead_letters}
    return {uid: _status(uid in admitted, steps[uid], letters.get(uid, "")) for uid in wanted}


def _status(admitted: bool, steps: list[int], letter: str) -> str:
    trained = f"trained in step {', '.join(map(str, steps))}" if steps else ""
    if trained or letter:
        return "; ".join(filter(None, (trained, letter)))
    return "admitted, neither trained nor a dead letter" if admitted else "not in the ledger"


def admitted_uids(run: RecordedRun) -> set[str]:
    """Every sample that was admitted; none without a readable journal."""
    try:
        entries = journal_entries(run.folder / LEDGER)
        return {uid for entry in entries for uid in entry.get("admitted", ())}
    except AuditError:
        return set()
