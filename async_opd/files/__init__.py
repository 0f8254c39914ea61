"""Files of a run: opened without following links, written as a whole or line by line; their format.

Imports the errors, and nothing else of the project.
"""
