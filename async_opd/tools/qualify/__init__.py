"""``async_opd qualify``: measures the parts of docs/status.md without proof on this machine.

``rows`` has a row for each such part, ``measurements`` its computation, ``harness`` runs rows
and writes the report, ``tables`` writes the report's figures into a document.
"""
