"""The console of a run: the live display, plain lines, the end screen; and live.json."""
