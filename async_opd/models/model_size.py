"""How large a model is and how its layers are built, by its config.json and file headers.

config.json, headers of *.safetensors ──► ModelSize      no torch; no weight is read
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import safe_open

from async_opd.core.errors import in_words
from async_opd.models.json_files import read_json
from async_opd.models.model_files import ModelError, layers_of
from async_opd.models.own_files import weights_file
from async_opd.models.tokenizer import text_settings

if TYPE_CHECKING:
    from async_opd.config.precision import Scheme

FLOATS = ("F64", "F32", "F16", "BF16")
"""Stored types that an engine casts to its own; others (quantized weights) it keeps."""
STORED_BYTES = {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1, "I16": 2, "I64": 8}
NOT_RECOMPUTED = frozenset(
    ("cpmant", "ctrl", "gpt_neox_japanese", "openai-gpt", "reformer", "xlm", "xlnet")
)
"""Model types of transformers without layers whose activations can be recomputed."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys under which configs have the number of a layer's experts."""
LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+\.")
TABLES = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|lm_head|embed_out)\.weight$")
FIRST_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.0\.")
VISION = re.compile(r"(^|\.)(visual|vision_tower|vision_model|multi_modal_projector)\.")
"""Names of a tower's tensors, and of what projects its states into the decoder's."""
PROJECTS = re.compile(r".*?(projector|merger|connector|aligner)[^.]*(\.\d+)?", re.IGNORECASE)
"""Beginnings of the names of the latter, for each one (``trainer.vision.parts``)."""

Moments = Literal["float32", "bfloat16", "8bit"]
"""In what AdamW's two moments are kept, as ``train.moments``."""
LARGEST_BLOCK, SMALLEST_BLOCK = 256, 64
SMALLEST_TENSOR = 4096
"""Entries of a tensor below which its moments stay in float32, as in bitsandbytes and torchao."""

Tensor = tuple[str, tuple[int, ...], str]
"""Name, shape and stored type."""


@dataclass(frozen=True)
class Tower:
    """The vision parts, with ``entries`` of which its ``projector`` has some.

    ``hidden`` and ``inner`` are the widths of its ``layers``, of ``block`` entries each; ``gated``:
    their feed-forward part has two input matrices, and their norms are RMSNorms. A patch is
    ``patch`` numbers; ``merged`` patches are a token of the decoder. For each patch the products of
    all projectors take, and all but the last of each give, ``projected`` numbers; ``projections``
    of them have a norm.
    """

    entries: int
    hidden: int
    inner: int
    layers: int
    patch: int
    merged: int
    projector: int = 0
    projected: int = 0
    projections: int = 0
    gated: bool = False
    block: int = 0

    @property
    def outside(self) -> int:
        """Entries outside of its layers: of patches, positions, norms and projectors."""
        return self.entries - self.layers * self.block

    @classmethod
    def of(cls, config: Mapping[str, Any], tensors: Sequence[Tensor]) -> Tower | None:
        """By a config.json and the vision tensors; None without any. TypeError, ValueError."""
        given = config.get("vision_config")
        if not isinstance(given, Mapping) or not tensors:
            return None
        hidden, side = _number(given, "hidden_size"), _number(given, "patch_size") or 14
        patch = 3 * side * side * max(_number(given, "temporal_patch_size"), 1)
        merged = max(_number(given, "spatial_merge_size"), 1) ** 2
        if tokens := _number(config, "mm_tokens_per_image"):
            merged = max((_number(given, "image_size") // side) ** 2 // tokens, 1)
        inner = _number(given, "intermediate_size") or 4 * hidden
        layers = _number(given, "depth", "num_hidden_layers")
        projectors: dict[str, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            if found := PROJECTS.match(tensor[0]):
                projectors[found[0]].append(tensor)
        of_projectors = [tensor for group in projectors.values() for tensor in group]
        return cls(
            _entries(tensors),
            hidden,
            inner,
            layers,
            patch,
            merged,
            projector=_entries(of_projectors),
            projected=sum(map(_projected, projectors.values())) // merged,
            projections=sum(any(map(_is_norm, group)) for group in projectors.values()),
            gated=any("gate_proj" in name for name, *_ in tensors),
            block=_entries(one for one in tensors if LAYER.search(one[0])) // max(layers, 1),
        )


@dataclass(frozen=True)
class ModelSize:
    """``floats`` entries in floating point and ``others`` bytes of other types, as stored.

    Widths: ``hidden`` of the residual stream, ``inner`` of the feed-forward part (of one expert in
    a mixture), ``query`` and ``key`` of all heads of queries and of keys in a layer.
    ``vocabulary`` is the number of rows of the head, ``embeddings`` those of embedding and head
    together: both are one matrix if it is tied. ``norms`` of the hidden width are in a layer,
    ``query_norms``: queries and keys are normalized too. ``gated``: the feed-forward part has two
    input matrices. ``active`` of ``experts`` compute a token; both 0 without a mixture.
    ``recomputable``: transformers can recompute the layers. ``tower``: the vision parts, if there
    are any. ``numels``: entries of a tensor, and the number of such tensors.
    ``outside``: entries outside of layers, embedding and head. Where layers differ, widths are the
    largest. ``caches``: for each layer that computes keys and values the heads that an engine
    keeps of a token, and the numbers of each; empty if not known.
    """

    floats: int
    others: int
    hidden: int
    inner: int
    layers: int
    vocabulary: int
    embeddings: int = 0
    query: int = 0
    key: int = 0
    heads: int = 1
    norms: int = 2
    query_norms: bool = False
    gated: bool = True
    experts: int = 0
    active: int = 0
    recomputable: bool = True
    tower: Tower | None = None
    numels: tuple[tuple[int, int], ...] = ()
    outside: int = 0
    caches: tuple[tuple[int, int], ...] = ()

    @classmethod
    def read(cls, model: str | Path) -> ModelSize:
        """Of a local directory, also without weights. ModelError for files that cannot be read."""
        path = Path(model)
        try:
            # a folder with the name of a hub id is another model
            tensors = tensors_of(path) if path.is_absolute() else ()
            return cls.of(read_json(path / "config.json"), tensors)
        except Exception as error:  # safetensors' exception has no base class
            message = f"the size of {path} cannot be read: {in_words(error)}"
            raise ModelError(message, "save the model again") from error

    @classmethod
    def of_weights(cls, model: str | Path) -> ModelSize:
        """``read``, of a model whose weights are on this machine. ModelError if they are not."""
        size = cls.read(model)
        if not size.floats + size.others:
            raise ModelError(f"the weights of {model} are not on this machine", "download it first")
        return size

    @classmethod
    def of(cls, config: Mapping[str, Any], tensors: Iterable[Tensor]) -> ModelSize:
        """By a config.json and all tensors. ValueError, TypeError for a value that is none."""
        tensors = list(tensors)
        floats = sum(math.prod(shape) for _, shape, kind in tensors if kind in FLOATS)
        others = sum(
            math.prod(shape) * STORED_BYTES.get(kind, 4)
            for _, shape, kind in tensors
            if kind not in FLOATS
        )
        numels = Counter(math.prod(shape) for _, shape, _ in tensors)
        vision = [one for one in tensors if VISION.search(one[0])]
        tensors = [one for one in tensors if not VISION.search(one[0])]
        first = {FIRST_LAYER.split(name)[-1] for name, *_ in tensors if FIRST_LAYER.search(name)}
        given = text_settings(config)
        layers = layers_of(given)
        widths = [_widths(one) for one in layers or [given]]
        hidden = _number(given, "hidden_size", "n_embd")
        table = sum(math.prod(shape) for name, shape, _ in tensors if TABLES.search(name))
        inside = _entries(one for one in tensors if LAYER.search(one[0]))
        inner = _number(given, "moe_intermediate_size", "intermediate_size") or 4 * hidden
        experts = _number(given, *EXPERTS)
        return cls(
            floats,
            others,
            hidden,
            inner,
            _number(given, "num_hidden_layers", "n_layer"),
            _number(given, "vocab_size"),
            embeddings=table // (hidden or 1),
            query=max(heads * width for heads, _, width in widths),
            key=max(keys * width for _, keys, width in widths),
            heads=max(heads for heads, *_ in widths),
            norms=sum(
                bool(re.search(r"(norm|ln_\d)\.weight$", n))
                for n in first
                if "." not in n.removesuffix(".weight")
            )
            or 2,
            query_norms=any("q_norm" in name for name in first),
            gated=any("gate_proj" in n or "gate_up" in n for n in first) or not first,
            experts=experts,
            active=_number(given, "num_experts_per_tok", "top_k_experts") if experts else 0,
            recomputable=given.get("model_type") not in NOT_RECOMPUTED,
            tower=Tower.of(config, vision),
            numels=tuple(numels.items()),
            outside=_entries(tensors) - inside - table if inside else 0,
            caches=_caches(given, [(keys, width) for _, keys, width in widths if layers]),
        )

    @property
    def block(self) -> int:
        """Entries of one layer of the decoder."""
        others = (self.tower.entries if self.tower else 0) + self.outside
        return (self.floats - others - self.embeddings * self.hidden) // max(self.layers, 1)

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one matrix."""
        return self.embeddings <= self.vocabulary

    def pinned(self, shards: int = 1) -> float:
        """Factor of the host memory of a shard of each tensor that torch pins one by one.

        It rounds every allocation up to a power of two.
        """
        parts = [(-(-numel // shards), count) for numel, count in self.numels]
        exact = sum(part * count for part, count in parts)
        return sum(power_of_two(part) * count for part, count in parts) / exact if exact else 1.0

    def head_bytes(self, dtype: str) -> int:
        """Bytes of the head's weight in ``dtype``."""
        return self.vocabulary * self.hidden * (4 if dtype == "float32" else 2)

    def engine_bytes(self, dtype: str, scheme: Scheme | None = None) -> int:
        """Bytes of its weights in an engine that computes in ``dtype``, quantized by a ``scheme``.

        Norms count as quantized, and vision parts as not.
        """
        itemsize = 4 if dtype == "float32" else 2
        whole = self.floats * itemsize + self.others
        if scheme is None:
            return whole
        quantized = self.layers * (self.expert_entries if scheme.experts else self.block)
        return whole - int(quantized * (itemsize - scheme.nbytes))

    @property
    def expert_entries(self) -> int:
        """Entries of the experts of a layer; 0 without a mixture."""
        return self.experts * self.inner * self.hidden * (3 if self.gated else 2)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << max(number - 1, 0).bit_length()


def _entries(tensors: Iterable[Tensor]) -> int:
    return sum(math.prod(shape) for _, shape, _ in tensors)


def _projected(tensors: Sequence[Tensor]) -> int:
    """Numbers that the products of a projector take, and all but the last one give."""
    matrices = [shape for _, shape, _ in sorted(tensors) if len(shape) == 2]
    return sum(shape[1] for shape in matrices) + sum(shape[0] for shape in matrices[:-1])


def _is_norm(tensor: Tensor) -> bool:
    """Whether it is a norm's weight: ``norm.weight``, and ``ln_q.weight`` of Qwen2.5-VL."""
    name, shape, _ = tensor
    return len(shape) == 1 and bool(re.search(r"(norm|ln_q)\.weight$", name))


def _widths(settings: Mapping[str, Any]) -> tuple[int, int, int]:
    """A layer's heads of queries, its heads of keys, and the width of each."""
    heads = _number(settings, "num_attention_heads", "n_head") or 1
    hidden = _number(settings, "hidden_size", "n_embd")
    width = _number(settings, "qk_head_dim", "head_dim") or hidden // heads
    return heads, _number(settings, "num_key_value_heads") or heads, width


def _caches(
    settings: Mapping[str, Any], keys: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """See ``ModelSize.caches``. Latent attention keeps one compressed head, and rotary numbers."""
    own = keys[: max(len(keys) - _number(settings, "num_kv_shared_layers"), 0)]
    if latent := _number(settings, "kv_lora_rank"):
        return ((1, latent + _number(settings, "qk_rope_head_dim")),) * len(own)
    return tuple((heads, 2 * width) for heads, width in own)


def _number(settings: Mapping[str, Any], *names: str) -> int:
    """The first of these that is set; 0 if none is."""
    return next((int(settings[name]) for name in names if settings.get(name)), 0)


def tensors_of(path: Path) -> list[Tensor]:
    """Name, shape and stored type of each tensor: of the files that the index names, or of all."""
    index: Mapping[str, Any] = read_json(path / "model.safetensors.index.json").get(
        "weight_map", {}
    )
    files = sorted(path / name for name in set(index.values()))
    found = []
    for file in files or sorted(path.glob("*.safetensors")):
        with safe_open(weights_file(file), framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dictionary
                tensor = opened.get_slice(name)
                found.append((name, tuple(tensor.get_shape()), str(tensor.get_dtype())))
    return found


def block_of(shape: Sequence[int]) -> int | None:
    """Entries that share one scale in 8 bits; None for a tensor whose moments stay in float32.

    Blocks lie within rows, so that however many ranks divide the rows, no block is divided.
    """
    if len(shape) < 2 or math.prod(shape) < SMALLEST_TENSOR:
        return None
    block = math.gcd(LARGEST_BLOCK, shape[-1])
    return block if block >= SMALLEST_BLOCK else None


def moment_bytes(moments: Moments, shape: Sequence[int]) -> int:
    """Bytes of both moments of a parameter of this shape, over all of its shards."""
    entries, block = math.prod(shape), block_of(shape)
    if moments == "8bit" and block is not None:
        return 2 * (entries + 4 * entries // block)
    return 2 * entries * (2 if moments == "bfloat16" else 4)
