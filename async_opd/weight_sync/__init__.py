"""How a new weight version reaches the rollout engines: state machine, rendezvous, layout.

Both ends and the driver use it.
"""
