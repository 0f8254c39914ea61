"""Keys of other frameworks that a config of ours may be given by mistake, and our name for each.

``foreign_keys.yaml`` has them; it is read for a key that is not known here.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from async_opd.config.yaml_text import load_yaml

GPU_COUNTS = ("gpus", "num_gpus", "n_gpus", "gpus_per_node", "n_gpus_per_node", "nodes", "nnodes")
"""Keys of the number of GPUs of a whole run, which no config of ours has."""
GPUS = (
    "each pool has its own: rollout.replicas × rollout.tensor_parallel, the same of each teacher, "
    "and train.ranks; async_opd plan CONFIG --gpus N advises them"
)
"""Where GPUs are set."""


@cache
def table() -> dict[str, Any]:
    """``sections``: the frameworks by section; ``keys``: our key by theirs, by framework."""
    text = files(__package__).joinpath("foreign_keys.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = load_yaml(text)
    return found


def name_here(key: str) -> tuple[str, str] | None:
    """The framework that a key belongs to and our name for it; None for any other key.

    Our name is empty for a section that only a file of another framework has.
    """
    if key in table()["sections"]:
        return table()["sections"][key], ""
    last = key.rpartition(".")[2]
    keys = table()["keys"].items()
    return next(((framework, ours[last]) for framework, ours in keys if last in ours), None)
