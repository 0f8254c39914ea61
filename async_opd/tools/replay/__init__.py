"""``async_opd replay``: computes a kept step again, and compares it with what the run did.

``kept_run`` finds the checkpoint and the files, ``comparison`` says where two steps first differ.
"""
