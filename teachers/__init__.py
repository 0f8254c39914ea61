"""The scoring stage: rollouts go through the teachers' replicas and come back with scores.

Imports the rooms of ``async_opd`` below the stages; ``replica`` and ``scoring_worker`` import vLLM.
"""
