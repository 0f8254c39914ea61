"""Images as encoded bytes: what they decode to.

Engines, ranks and the view all get the pixels of ``decode``. Imports nothing of the project.
"""
