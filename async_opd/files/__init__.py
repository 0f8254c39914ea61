"""Files of a run: opened without following links, written as a whole or line by line; their format.

Imports ``core``, of which only the errors and what is said of a written file.
"""
