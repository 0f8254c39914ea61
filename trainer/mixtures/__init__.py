"""Mixtures of experts: what of them differs from other students.

Imports ``trainer.batches``.
"""
