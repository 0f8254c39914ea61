"""Bytes of a GPU that a load of new weights takes beside an engine's share of it.

    chunk ──clones──► all that is given of a module, unsharded ──► the module, made again
                                                                     └──► as kernels want it

vLLM keeps the tensors that it is given of a module until all of them have come, makes the module
again, and copies that to where the old one is (``vllm.model_executor.model_loader.reload``). Before
the first load it has filled its share with KV cache; its profile knows of no load.
"""

from __future__ import annotations

from async_opd.models.model_size import ModelSize

PADDING = 64
"""vLLM makes rows of embedding and head a multiple of so many, and waits for those that it added:
such a module is complete only when everything has come."""


def reload_bytes(size: ModelSize, itemsize: int, parallel: int, chunk: int | None) -> int:
    """The peak on each of ``parallel`` GPUs of an engine, for entries of ``itemsize`` bytes.

    Weights come to the GPU in messages of ``chunk`` bytes, or of one larger tensor; None: they come
    through host memory, and the GPU only has the module.
    """
    table = itemsize * size.vocabulary * size.hidden
    made_of_table, modules = table // parallel, _modules(size, itemsize, parallel)
    if chunk is None:
        return max(made_of_table, *(made for _, made in modules))
    layers = max(map(sum, modules)) + chunk
    packed = chunk if table <= chunk else 0
    if size.vocabulary % PADDING == 0:
        return max(layers, table + made_of_table + packed)
    return itemsize * size.embeddings * size.hidden + max(layers, made_of_table + packed)


def _modules(size: ModelSize, itemsize: int, parallel: int) -> list[tuple[int, int]]:
    """Of the largest modules of a layer the bytes that are given, and those that are made of them.

    Of a mixture's experts, all of which are one module, kernels may want another form beside.
    """
    each = itemsize * size.inner * size.hidden * (2 if size.gated else 1)
    attention = itemsize * (size.query + 2 * size.key) * size.hidden
    found = [(attention, attention // parallel), (each, each // parallel)]
    if size.experts:
        experts = size.experts * (each + itemsize * size.inner * size.hidden)
        found.append((experts, 2 * experts // parallel))
    return found
