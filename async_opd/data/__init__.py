"""Where prompts come from: rows of a source, and the stream of prompts made of them.

Imports ``models`` (the tokenizer of teachers' prompts), ``media``, ``files``, ``config`` and
``core``.
"""
