"""The stages of a run in virtual time.

Imports the slots and constants of the real stages, so that both decide alike.
"""
