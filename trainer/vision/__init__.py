"""VLM students: vision parts, images of packed rows, positions of their tokens.

Knows neither the loss nor the ranks. Nothing here is by family: parts are found by their names in
transformers' model, positions are the model's own.
"""
