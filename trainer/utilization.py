"""A step's use of its devices: FLOP/s, their share of the peak, and GPU memory.

Model FLOPs of a step are what the student's formula needs, however it is computed:

    6 · entries of the decoder's matrices · tokens             2 forward, 4 backward
  + 6 · entries of the head             · response tokens      no other row reaches the head
  + 6 · heads · (query + value width)   · pairs, per layer     pairs: (token, token it attends to)

6N and the attention term are those of PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B),
with two differences: pairs that a causal mask or a window excludes do not count (PaLM's term has
all T² of a sequence), and looking up an embedding is not a product. Recomputed activations, the
objective, a teacher's head and the optimizer do not count. A frozen matrix counts 4: it has no
gradient. MFU is these FLOPs over what the device could have computed in the time of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from trainer.vision.parts import language_model, vision_parameters

if TYPE_CHECKING:
    from async_opd.core.samples import Header

GIB = float(1 << 30)

PEAK_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A30", 165.0),
    ("A40", 150.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 4090", 165.0),
)
"""Dense bfloat16 TFLOP/s by words of the device's name, from the vendor's data sheets (those with
a star in a sheet, for sparse matrices, are halved). The first name that fits counts."""


def peak_tflops(device: torch.device, bfloat16: bool, given: float | None) -> float | None:
    """The device's TFLOP/s in the precision of training: ``given``, or by its name.

    None if nothing is given and the device is not in the table, or training is not bfloat16.
    """
    if given is not None or device.type != "cuda" or not bfloat16:
        return given
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    for name, peak in PEAK_TFLOPS:
        if set(name.split()) <= set(words):
            return peak
    return None


def utilization(
    flops: float | None, seconds: float, ranks: int, peak: float | None
) -> dict[str, float]:
    """``train/tflops`` of each rank's device, in the mean; ``train/mfu``, their share of ``peak``.

    Without a ``peak`` (TFLOP/s) there is no ``train/mfu``, and without ``flops`` neither.
    """
    if flops is None:
        return {}
    reached = flops / seconds / ranks / 1e12
    metrics = {"train/tflops": reached}
    return metrics if peak is None else {**metrics, "train/mfu": reached / peak}


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of a GPU that torch's tensors had: now, and most since the last reading.

    ``outside``: bytes in use that torch has not taken: CUDA's context, communicators of NCCL, and
    all of other processes.
    """

    now: int
    peak: int
    outside: int


def memory_use(device: torch.device) -> MemoryUse | None:
    """Reads the device's memory and starts a new peak; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    used = MemoryUse(
        torch.cuda.memory_allocated(device),
        torch.cuda.max_memory_allocated(device),
        total - free - torch.cuda.memory_reserved(device),
    )
    torch.cuda.reset_peak_memory_stats(device)
    return used


def memory_metrics(uses: Sequence[MemoryUse | None]) -> dict[str, float]:
    """The most of all ranks and, of several ranks, that of each; nothing from a CPU."""
    known = {rank: use for rank, use in enumerate(uses) if use is not None}
    if not known:
        return {}
    most = MemoryUse(*map(max, zip(*map(astuple, known.values()), strict=True)))
    named = {"train": most}
    if len(uses) > 1:
        named |= {f"train/rank/{rank}": use for rank, use in known.items()}
    return {
        key: value / GIB
        for prefix, use in named.items()
        for key, value in (
            (f"{prefix}/gpu_memory_gib", use.now),
            (f"{prefix}/gpu_memory_peak_gib", use.peak),
            (f"{prefix}/gpu_memory_outside_gib", use.outside),
        )
    }


MULTIPLY_ADD, WITH_BACKWARD = 2, 3
"""FLOPs of a product's entry; and of forward plus backward, as a multiple of the forward pass."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys under which configs of transformers have the number of a layer's experts."""


@dataclass(frozen=True)
class ModelSize:
    """The inputs of a student's FLOPs.

    ``decoder``: entries of its matrices that one token is multiplied by; of a mixture of experts,
    of the experts that a token is sent to. ``head``: entries of the head. A frozen entry counts two
    thirds in both. ``attention``: for each layer query plus value width over all its heads.
    ``windows``: for each layer how many tokens a token attends to at most, itself included, or None
    for all before it. ``tower`` and ``projector``: entries of the vision matrices, ``patches`` of
    which a token of an image is made. ``unknown``: why FLOPs cannot be counted; ``decoder`` then
    has all of the model's entries, which is enough to share samples out.
    """

    decoder: int
    head: int
    attention: tuple[int, ...]
    windows: tuple[int | None, ...]
    tower: int = 0
    projector: int = 0
    patches: int = 1
    unknown: str = ""

    @classmethod
    def of(cls, model: Any) -> ModelSize:
        """The size of a causal language model of transformers, before or after sharding.

        A model whose config cannot be read so is ``unknown``: its run only lacks metrics.
        """
        try:
            settings = model.config.get_text_config()
            return cls(
                _decoder(model, settings),
                _counted(model.get_output_embeddings().weight),
                tuple(map(_attention, _layers(settings))),
                _windows(settings),
                *_seeing(model),
            )
        except Exception as error:  # each family's config has other attributes, and other errors
            why = f"{type(error).__name__}: {error}"
            return cls(sum(map(_counted, model.parameters())), 0, (), (), unknown=why)

    def of_sample(self, header: Header, image_tokens: int = 0, dense: bool = False) -> float:
        """FLOPs of a sample: linear in its tokens and in its images', and its segments' attention.

        Without attention's where it computes whole packed rows (``dense``), whatever is in them;
        without that of the tower, which is within each image.
        """
        size = replace(self, attention=(), windows=()) if dense else self
        lengths = header.segments or [header.tokens]
        of_tokens = size.training_flops(lengths, [header.response_tokens])
        entries = self.tower * self.patches + self.projector
        return of_tokens + float(MULTIPLY_ADD * WITH_BACKWARD * entries * image_tokens)

    def training_flops(self, lengths: Sequence[int], responses: Sequence[int]) -> float:
        """FLOPs of forward and backward pass of sequences with these tokens and response tokens."""
        entries = self.decoder * sum(lengths) + self.head * sum(responses)
        layers = zip(self.attention, self.windows, strict=True)
        entries += sum(width * attended(n, window) for width, window in layers for n in lengths)
        return float(MULTIPLY_ADD * WITH_BACKWARD * entries)


def attended(tokens: int, window: int | None) -> int:
    """Pairs of a token and one that it attends to: itself and the ones before, in the window."""
    if window is None or window >= tokens:
        return tokens * (tokens + 1) // 2
    return window * (window + 1) // 2 + (tokens - window) * window


def _decoder(model: Any, settings: Any) -> int:
    """Entries of all matrices but embeddings and head; of experts, the share that is active."""
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    apart = {id(weight) for weight in (*tables, model.get_output_embeddings().weight)}
    experts: Any = next(
        (getattr(settings, name) for name in EXPERTS if hasattr(settings, name)), None
    )
    entries = 0
    active: Any = getattr(settings, "top_k_experts", None) or getattr(
        settings, "num_experts_per_tok", 0
    )
    for parameter in language_model(model).parameters():
        if parameter.ndim < 2 or id(parameter) in apart:
            continue
        stacked = parameter.ndim == 3 and parameter.shape[0] == experts
        numel = _counted(parameter)
        entries += numel * active // experts if stacked else numel
    return entries


def _counted(weight: torch.Tensor) -> int:
    """Entries of a matrix; two thirds of them if it is frozen."""
    return weight.numel() if weight.requires_grad else weight.numel() * 2 // 3


def _seeing(model: Any) -> tuple[int, int, int]:
    """Entries of tower and projector, and the patches of a token of an image.

    Nothing before a frozen tower is trained: it has no backward pass, and its entries count a
    third.
    """
    entries = {"vision_tower": 0, "projector": 0}
    for part, _, parameter in vision_parameters(model):
        if parameter.ndim >= 2:
            numel = parameter.numel()
            entries[part] += numel if parameter.requires_grad else numel // WITH_BACKWARD
    merged = getattr(getattr(model.config, "vision_config", None), "spatial_merge_size", 1)
    return entries["vision_tower"], entries["projector"], int(merged) ** 2


def _layers(settings: Any) -> list[Any]:
    """The config of each layer; the model's own raises for what differs by layer (Gemma 4)."""
    own = getattr(settings, "per_layer_config", None)
    return [own[layer] if own else settings for layer in range(settings.num_hidden_layers)]


def _attention(settings: Any) -> int:
    heads = settings.num_attention_heads
    width = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    query = getattr(settings, "qk_head_dim", None) or width  # they differ in latent attention
    value = getattr(settings, "v_head_dim", None) or width
    return int(heads * (query + value))


def _windows(settings: Any) -> tuple[int | None, ...]:
    layers = _layers(settings)
    kinds = getattr(settings, "layer_types", None) or ["sliding_attention"] * len(layers)
    return tuple(
        getattr(layer, "sliding_window", None) if kind == "sliding_attention" else None
        for layer, kind in zip(layers, kinds[: len(layers)], strict=True)
    )
