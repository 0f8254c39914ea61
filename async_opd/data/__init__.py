"""Where prompts come from: rows of a source, and the stream of prompts made of them."""
