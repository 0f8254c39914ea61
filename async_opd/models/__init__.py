"""Model directories, read without transformers: files, tokenizer, output head, engine arguments.

``processor`` alone imports transformers, when a processor is loaded.
"""
