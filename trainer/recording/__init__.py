"""Records of single tokens, taken from what a step computes; see ``async_opd.microscope``.

The losses call ``rows`` for samples that are recorded, a rank its ``Recorder``.
"""
