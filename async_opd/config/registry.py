"""The registries of prompt sources and weight transports: a new one is a module and an entry here.

Entries are strings, because the modules lie in rooms that import the config. CONTRIBUTING.md shows
how to write such a module, and names the places of losses, graders, metrics and commands.
"""

from __future__ import annotations

SOURCES = {
    "file": "async_opd.data.files:FileSource",
    "hub": "async_opd.data.hub:HubSource",
    "reasoning_gym": "async_opd.data.reasoning_gym:ReasoningGymSource",
    "user": "async_opd.data.user:UserSource",
}
"""Classes of prompt sources, by their ``kind``."""
TRANSPORTS = {
    "gloo": "rollouter.transports.gloo",
    "nccl": "rollouter.transports.nccl",
    "shared_memory": "rollouter.transports.shared_memory",
}
"""Modules with both ends of a weight transport, by ``sync.backend``."""
THROUGH_HOST = ("gloo", "shared_memory")
"""Transports by which weights come to a GPU through host memory, which the memory plan then counts.
Any other one is taken for one between GPUs, as NCCL is."""
