"""``async_opd doctor``: what a run of a config would meet here, a line for each thing examined.

    checks.preflight ──► problems, notes ─┐
    topics of this room ──► findings ─────┴──► lines or JSON, exit code

``examination`` calls one module for each topic; ``command`` shows what they found.
"""
