"""The stages of a run in virtual time.

Imports the stages' own slots and balancer, so that both decide alike.
"""
