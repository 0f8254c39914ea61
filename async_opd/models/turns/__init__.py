"""Episodes as tokens: what follows the sampled tokens of a turn, and the calls in its text."""

from async_opd.models.turns.continuation import History, Turns

__all__ = ["History", "Turns"]
