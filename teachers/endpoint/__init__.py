"""Teachers that are servers of somebody else: requests, answers, checks.

Imports the scoring stage's own classes and ``async_opd.core``; no vLLM.
"""
