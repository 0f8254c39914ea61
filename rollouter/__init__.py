"""The rollout stage: the student's vLLM replicas answer prompts and take new weights.

Imports the rooms of ``async_opd`` below the stages; vLLM in ``engine``, ``replica`` and
``transports`` only.
"""
