"""``async_opd probe``: will this teacher teach this student?

    responses and scores of both ──► figures ──verdict──► words, a suggestion, a score

``figures`` and ``verdict`` compute with arrays alone. ``measuring`` asks models
behind two Protocols for answers and scores, ``asked`` makes their prompts, ``engines`` starts them
through ``cluster``, ``command`` shows what was found. Prompts, templates and how far the student is
from itself are examined as in ``doctor``.
"""
