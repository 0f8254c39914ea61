"""Teachers that run on external servers: requests, answers, checks.

Imports the scoring stage's own classes and ``async_opd.core``; no vLLM.
"""
