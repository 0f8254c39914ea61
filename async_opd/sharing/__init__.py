"""GPUs that several pools use in turn: locks, turns, what waits for them.

    shared_gpus    all of it as the rollout stage uses it: which lock is taken when
    time_sharing   a pool of hosts and its guests alternate
    gpu_turns      the trainer as a guest of the rollout engines
    backlog        what a colocated teacher is to score in its turn
    barriers       engines on the GPUs of several ranks start together

Imports ``config``, ``waiting`` and ``core``.
"""
