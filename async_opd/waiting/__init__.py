"""Waits with a bound: deadlines, progress watchdogs, gates, and races of several waits.

Imports ``core``. No other module of the library waits by a timer of its own.
"""
