"""Small pictures of the images that shown samples have, and how a prompt with images is printed.

Imports ``data`` (prompts), ``microscope`` (which samples are recorded), ``media``, ``models``,
``processes``, ``files`` and ``core``.
"""
