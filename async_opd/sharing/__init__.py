"""GPUs that several pools use in turn: locks, turns, what waits for them.

    shared_gpus    all of it as the rollout stage uses it: which lock is taken when
    time_sharing   a pool of hosts and its guests alternate
    gpu_turns      the trainer as a guest of the rollout engines; barriers of several ranks
    backlog        what a colocated teacher is to score in its turn

Imports ``config``, ``waiting`` and ``core``.
"""
