"""How the decoder's layers run: which of their activations are computed again, what is compiled.

Imports ``trainer.losses`` for the compiler's errors, and transformers.
"""
