"""Measurements on one GPU with torch and transformers alone: no ray, vllm or pydantic.

``python -m benchmarks.gpu.NAME [--device cuda|cpu]`` prints a line of JSON for every cell (one
combination of what is varied) and, last, one line with all of them. With ``--device cpu`` the sizes
are small: that shows that a script works, not how fast a GPU is. ``benchmarks.gpu.all`` runs them
all; ``benchmarks.gpu.tables`` writes the figures into docs/gpu.md.
"""
