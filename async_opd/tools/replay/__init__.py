"""``async_opd replay``: computes a kept step again, and compares it with what the run did.

``kept_run`` finds the checkpoint and the files, ``command`` says where two steps first differ.
"""
