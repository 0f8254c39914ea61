"""The measurements of ``async_opd qualify``, by module, whose ``main`` fills a row's Report.

On a CPU the sizes are small: that shows that a part works, not how fast a GPU is. Modules that need
torch and transformers alone import neither ray, vllm nor pydantic.
"""
