"""What a config names that is a module of its own: a new one is a module and an entry here.

Entries are strings, because the modules lie in rooms that import the config. CONTRIBUTING.md shows
how to write such a module.
"""

from __future__ import annotations

SOURCES = {
    "file": "async_opd.data.files:FileSource",
    "reasoning_gym": "async_opd.data.reasoning_gym:ReasoningGymSource",
}
"""``kind`` of a source of prompts: its class, by its name."""
TRANSPORTS = {"gloo": "rollouter.transports.gloo", "nccl": "rollouter.transports.nccl"}
"""``sync.backend``: the module with both ends of a weight transport, by its name."""
