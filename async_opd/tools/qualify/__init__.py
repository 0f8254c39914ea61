"""``async_opd qualify``: what docs/status.md has no proof of, measured on the machine at hand.

``rows`` has a row for each such part, ``measurements`` what a row computes, ``harness`` runs rows
and writes the report, ``tables`` writes the report's figures into a document.
"""
