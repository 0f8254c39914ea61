"""Model directories, read without transformers: files, tokenizer, output head, engine arguments.

Imports ``config`` and ``core``.
"""
