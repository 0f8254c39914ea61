"""The message queue between the stages: topics, leases, images, and how large messages are.

Imports ``models``, ``processes``, ``config``, ``waiting``, ``media`` and ``core``.
"""
