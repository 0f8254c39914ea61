"""The memory planner's bytes of a rank, over those of torch's memory tracker.

    async_opd.memory.step ──planned──┐
    MemTracker, FSDPMemTracker ──────┴──► ratios by term

The tracker (``torch.distributed._tools``) shares no code with the planner. ``real``: steps on CPU
tensors, with one rank, and with two over gloo. ``fake``: 4B to 32B students and a 30B mixture with
3B active, on fake tensors and as many fake ranks as named. ``worst_ratio`` is planned over measured
of the term that is furthest from 1, of those that are 2 % of the peak at least.

``load_peak_ratio`` and what belongs to it are of ``benchmarks.load_memory``.

``python -m benchmarks.memory`` prints one JSON object last. ``--layers`` cuts the depth of all fake
students, as ``SHALLOW`` that of some.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from async_opd.config.sections.train import TrainConfig
from benchmarks import load_memory
from benchmarks.memory_step import Case, fake_ranks, gloo_ratios, ratios

VOCABULARY = 151_936
DENSE = {
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
    "14B": (5120, 17408, 40, 40, False),
    "32B": (5120, 25600, 64, 64, False),
}
"""Hidden and inner width, layers, heads, tied head: of Qwen3. All have 8 heads of keys of 128."""
FAKE_RANKS = {"4B": (1, 8), "8B": (2, 64), "14B": (4, 32), "32B": (8, 64), "30B-A3B": (8, 64)}
TOKENS, RESPONSES = 16384, 512
"""Of a row: 441 rows of logits are one chunk of a CPU."""
SHALLOW = 8
"""Layers of the fake students with selective recomputation. All layers are alike: of more, only the
kept activations and the states grow, and these of full depth are compared with ``full``."""


def dense(name: str, layers: int | None) -> Any:
    """The config of a dense student."""
    from transformers import Qwen3Config

    hidden, inner, depth, heads, tied = DENSE[name]
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers or depth,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
    )


def mixture(layers: int | None) -> Any:
    """Qwen3-30B-A3B: 128 experts, of which 8 compute a token."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=layers or 48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    )


def small(family: str, **settings: Any) -> Any:
    """A student of a few million parameters."""
    import transformers

    sizes = {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    return getattr(transformers, f"{family}Config")(**{**sizes, **settings})


def real() -> Iterator[Case]:
    """Small students of several families, by recomputation and dtype."""
    for family in ("Qwen3", "Llama", "Qwen2", "Mistral"):
        for kind in ("none", "selective", "full"):
            train = TrainConfig(dtype="float32", gradient_checkpointing=kind)
            yield Case(f"{family} {kind}", small(family), train)
    train = TrainConfig(dtype="bfloat16", gradient_checkpointing="none")
    yield Case("Qwen3 bfloat16", small("Qwen3", tie_word_embeddings=True), train)


def fake(layers: int | None) -> Iterator[Case]:
    """The students that a GPU trains, with the attention that it has."""
    for name, counts in FAKE_RANKS.items():
        for ranks in counts:
            for kind, depth in (("full", layers), ("selective", min(layers or SHALLOW, SHALLOW))):
                config = mixture(depth) if name == "30B-A3B" else dense(name, depth)
                train = TrainConfig(ranks=ranks, dtype="bfloat16", gradient_checkpointing=kind)
                title = f"{name} {kind}, {ranks} ranks"
                yield Case(title, config, train, TOKENS, RESPONSES, ragged=True)


def _shown(name: str, found: dict[str, float], started: float) -> float:
    """Prints the ratios; returns the one furthest from 1."""
    terms = ", ".join(f"{term} {ratio:.3f}" for term, ratio in found.items())
    print(f"{name}: {terms} ({time.perf_counter() - started:.0f} s)", flush=True)
    return max(found.values(), key=lambda ratio: abs(ratio - 1))


def gloo() -> Iterator[Case]:
    """Two real ranks."""
    for kind in ("none", "full"):
        train = TrainConfig(ranks=2, dtype="float32", gradient_checkpointing=kind)
        yield Case(f"2 gloo ranks, Qwen3 {kind}", small("Qwen3"), train)


def of_fake(case: Case) -> dict[str, float]:
    """The ratios of a case on fake tensors."""
    with fake_ranks(case.train.ranks) as mesh:
        return ratios(case, mesh)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, help="of the fake students")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose names begin so")
    parser.add_argument("--loaded-layers", type=int, default=12, help="of the student that loads")
    parser.add_argument("--loading-ranks", type=int, nargs="+", default=[1, 2, 4])
    given = parser.parse_args()
    # first: memory that this process frees would be its ranks'
    loading = load_memory.figures(given.loaded_layers, given.loading_ranks)
    kinds = (("real", real(), ratios), ("real", gloo(), gloo_ratios))
    kinds += (("fake", fake(given.layers), of_fake),)
    worst: dict[str, list[float]] = {"real": [], "fake": []}
    for kind, cases, measure in kinds:
        for case in cases:
            if case.name.startswith(tuple(given.only)):
                started = time.perf_counter()
                worst[kind].append(_shown(case.name, measure(case), started))
    if not all(worst.values()):
        counts = ", ".join(f"{len(found)} {kind}" for kind, found in worst.items())
        parser.error(f"--only {given.only} names {counts} cases → at least one of each kind")
    furthest = {kind: max(found, key=lambda r: abs(r - 1)) for kind, found in worst.items()}
    result = {
        "worst_ratio": round(max(furthest.values(), key=lambda r: abs(r - 1)), 3),
        **{f"worst_{kind}": round(ratio, 3) for kind, ratio in furthest.items()},
        "cases": sum(map(len, worst.values())),
    }
    print(json.dumps(result | loading))


if __name__ == "__main__":
    main()
