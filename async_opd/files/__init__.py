"""Files of a run directory: how they are opened, written whole, and told from other versions'.

Imports the errors, and nothing that knows of stages.
"""
