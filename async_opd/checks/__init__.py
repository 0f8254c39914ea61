"""What can be wrong with a run's input, found before any engine starts, all at once.

``preflight`` calls the rest. Imports every room of what it checks, no stage.
"""
