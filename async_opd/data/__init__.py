"""Where prompts come from: the kinds of sources, their rows, and the stream that mixes them."""
