"""Images as encoded bytes: the cache that fetches them by content hash, and what they decode to.

Engines, ranks and the view all get the pixels of ``decode``.
"""
