"""Digests of tensors, equal on every device: two sums over their bytes, dtype and shape.

    bytes ──four at a time──► words w_i ──► Σ w_i and Σ (i + 1) · w_i, modulo 2^64

Integer sums do not depend on the order of summation, so that trainer and engine agree bit by bit.
They find what goes wrong by accident: an outdated, swapped, cut or converted tensor. They are not
made against an attacker. This package imports no torch: callers pass it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Of the dtypes whose digests can be joined."""
CHUNK_WORDS = {"cpu": 1 << 16}
CHUNK_WORDS_GPU = 1 << 21
"""Words that are summed at a time. On a CPU their int64 products fit the cache: 1 to 3 GB/s on one
core, much less with chunks of a GPU's size, where products and factors take 32 MiB each."""


class Digests:
    """Collects the digests of named tensors; on a GPU nothing waits before ``values``.

    A tensor of one chunk takes two kernels: a mixture of thousands of small tensors is bound by
    their launches.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._chunks: dict[str, tuple[str, list[Any]]] = {}
        self._factors: dict[Any, Any] = {}

    def add(self, name: str, tensor: Any) -> None:
        """Takes a tensor; a second one of the same name replaces the first."""
        kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        self._chunks[name] = kind, list(self._sums(tensor.detach()))

    def add_all(self, named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yields the named tensors, and takes each as it passes."""
        for name, tensor in named:
            self.add(name, tensor)
            yield name, tensor

    def values(self) -> dict[str, str]:
        """The digests by name: dtype, shape, and 32 hexadecimal digits. One copy from a device."""
        by_device: dict[Any, list[Any]] = {}
        for sums in (one for _, chunks in self._chunks.values() for one in chunks):
            by_device.setdefault(sums.device, []).append(sums)
        copied = {d: iter(self._torch.stack(all_).tolist()) for d, all_ in by_device.items()}
        self._factors.clear()
        found: dict[str, str] = {}
        for name, (kind, chunks) in self._chunks.items():
            first = second = start = 0
            for sums in chunks:
                one, other = next(copied[sums.device])
                first, second = first + one, second + other + start * one
                start += _chunk_words(sums.device)
            found[name] = f"{kind}:{first % 2**64:016x}{second % 2**64:016x}"
        return found

    def _sums(self, tensor: Any) -> Iterator[Any]:
        """Both sums of each chunk, int64 [2], on the tensor's device; places begin at 1 in each.

        Several are allocated before the products: a small tensor that stays, made beside each
        product, would keep the C library from using the product's memory again.
        """
        torch = self._torch
        data = tensor.contiguous().view(-1).view(torch.uint8)
        if rest := -data.numel() % 4:
            data = torch.nn.functional.pad(data, (0, rest))
        words = data.view(torch.int32) if data.storage_offset() % 4 == 0 else None
        if words is None:  # a view of another dtype has to be aligned
            words = data.clone().view(torch.int32)
        factors = self._factors_on(tensor.device)
        parts = words.split(_chunk_words(tensor.device))
        if len(parts) == 1:
            yield (parts[0] * factors[:, : words.numel()]).sum(1)
            return
        sums = torch.empty((len(parts), 2), dtype=torch.int64, device=tensor.device)
        for part, both in zip(parts, sums, strict=True):
            yield torch.sum(part * factors[:, : part.numel()], 1, out=both)

    def _factors_on(self, device: Any) -> Any:
        """Ones, and the places from 1 on, int64 [2, words of a chunk], until ``values``."""
        if device not in self._factors:
            places = self._torch.arange(1, 1 + _chunk_words(device), device=device)
            self._factors[device] = self._torch.stack((self._torch.ones_like(places), places))
        return self._factors[device]


def _chunk_words(device: Any) -> int:
    return CHUNK_WORDS.get(device.type, CHUNK_WORDS_GPU)


def joined(digests: Sequence[str]) -> str | None:
    """The digest of tensors that are concatenated along their first dimension.

    Both sums follow from those of the parts. None if the parts do not fit together, or if one does
    not end with a whole word.
    """
    parts = [_PARTS.fullmatch(digest) for digest in digests]
    found = [part.groups() for part in parts if part is not None]
    if len(found) < len(digests) or len({(dtype, rest) for dtype, _, rest, _, _ in found}) != 1:
        return None
    dtype, _, rest, _, _ = found[0]
    width = BYTES.get(dtype, 0)
    for size in rest.split(", ")[1:]:
        width *= int(size)
    rows = first = second = 0
    for _, its_rows, _, one, other in found:
        if rows * width % 4:
            return None
        first += int(one, 16)
        second += int(other, 16) + rows * width // 4 * int(one, 16)
        rows += int(its_rows)
    return f"{dtype}[{rows}{rest}]:{first % 2**64:016x}{second % 2**64:016x}"


_PARTS = re.compile(r"(\w+)\[(\d+)((?:, \d+)*)\]:([0-9a-f]{16})([0-9a-f]{16})")
