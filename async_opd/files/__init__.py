"""Files of a run: opened without following links, written as a whole or line by line; their format.

Files below a given directory are read by ``foreign.ForeignPath`` alone.
"""
