"""The student as the trainer runs it: loading, checking, sharding, its weights by name.

Imports transformers and torch.
"""
