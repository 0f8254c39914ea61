"""Files of a run: opened without following links, written as a whole or line by line.

Imports nothing of the project.
"""
