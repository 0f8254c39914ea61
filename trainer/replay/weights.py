"""Per-rank weight digests: a digest of each, and a few entries that show how far off.

own shard of each parameter ──► digest, equal only for equal bits
                            └─► up to 16 of its entries, for the size of a difference
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_opd.weight_sync.digests import Digests

ENTRIES = 16
"""Numbers of each tensor whose values are kept, at even distances from its first one."""


@dataclass(frozen=True, eq=False)
class Weights:
    """Of one rank: the digest of each of its tensors by name (``weight_sync.digests``).

    ``entries`` float32 [tensors, ENTRIES] has some of their numbers, and zeros in place of those
    that a smaller tensor does not have.
    """

    digests: dict[str, str]
    entries: NDArray[np.float32]


def weights_of(model: Any) -> Weights:
    """Of what a checkpoint has of the model; of a sharded one this rank's part."""
    import torch

    from trainer.saving.state import stored_state
    from trainer.student.slices import own_part

    digests = Digests(torch)
    entries = []
    for name, tensor in stored_state(model):
        own = own_part(tensor.detach())
        digests.add(name, own)
        flat = own.reshape(-1)
        some = flat[:: max(len(flat) // ENTRIES, 1)][:ENTRIES].float()
        entries.append(torch.nn.functional.pad(some, (0, ENTRIES - len(some))))
    together = torch.stack(entries).cpu().numpy() if entries else np.zeros((0, ENTRIES), np.float32)
    return Weights(digests.values(), together)
