"""Files of a run: opened without following links, written as a whole or line by line; their format.

What lies below a directory that was given is read by ``foreign.ForeignPath`` alone.

Imports ``core``, of which only the errors and the record of a written file.
"""
