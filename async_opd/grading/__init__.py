"""Graders, the processes that they run in, and evaluation, which uses them."""
