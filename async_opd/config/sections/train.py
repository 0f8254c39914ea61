"""The ``train`` section: the optimizer, the student in its ranks, adapters."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from async_opd.config.sections.section import Count, Section

MAX_BFLOAT16_BETA = 0.99
"""A bfloat16 has 8 significant bits. With a decay rate above it, an entry whose gradients vanish
would keep its moment for ever: the decay is less than the rounding."""


ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's ``max_lora_rank`` (``vllm.config.lora.MaxLoRARanks``)."""
FEED_FORWARD = re.compile(r"\.(mlp|feed_forward|block_sparse_moe)\.")
"""In names of layers: inside of the feed-forward part of a decoder layer."""


class LoraConfig(Section):
    """Adapters of low rank, which are trained through peft in place of the student's own weights.

        y = W x + s · B A x      W [out, in] frozen, A [rank, in] and B [out, rank] trained

    B begins at 0: the first forward pass is the student's own, bit for bit. Frozen matrices have
    the precision of ``train.dtype``, without float32 masters, gradients and moments.
    """

    rank: Count = 32
    """Rows of A and columns of B."""
    alpha: float = Field(default=64, gt=0)
    """Scale of the adapters: s is ``alpha / rank``."""
    use_rslora: bool = False
    """s is ``alpha / √rank`` instead (arXiv:2312.03732): high ranks learn as fast as low ones."""
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Matrices with an adapter: names of layers such as ``q_proj``, or all linear layers but the
    head. A mixture of experts has adapters in its attention only: its experts are not linear
    layers, and peft takes the names of its other ones for theirs."""
    sync: Literal["merged", "adapter"] = "merged"
    """The content of a weight sync: all weights, with W + s · B A in place of W (``merged``), or
    the adapters only, which vLLM's LoRA layers apply (``adapter``): less to send, and slower
    generation."""

    @property
    def scale(self) -> float:
        """The factor s of the adapters' product."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def engine_rank(self) -> int | None:
        """The smallest ``max_lora_rank`` of vLLM that holds the rank; None if there is none."""
        return next((rank for rank in ENGINE_RANKS if rank >= self.rank), None)

    def adapted(self, layers: Collection[str], mixture: bool) -> list[str]:
        """Which of a model's linear layers, by dotted name and without the head, have an adapter.

        Of a ``mixture`` of experts none inside of its feed-forward parts.
        """
        return [
            name
            for name in layers
            if self.targets == "all-linear" or name.rpartition(".")[2] in self.targets
            if not (mixture and FEED_FORWARD.search(name))
        ]

    def entries(self, shapes: Iterable[tuple[int, int]]) -> int:
        """Trained entries of adapters of matrices [out, in]: rank · (out + in) of each."""
        return sum(self.rank * (rows + columns) for rows, columns in shapes)


ExportDtype = Literal["auto", "float32", "bfloat16"]


class TrainConfig(Section):
    """The optimizer, and the distribution of batches over the hardware."""

    steps: Count = 200
    """Optimizer steps."""
    epochs: float | None = Field(default=None, gt=0)
    """In place of ``steps``: how often the rows of ``data.train`` are taken, on average over all of
    its sources. The run's config has the steps that this gives."""
    batch_size: Count = 128
    """Samples of one step."""
    lr: float = Field(default=1e-5, gt=0, le=1)
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """The learning rate after the warm-up: ``lr``, or a cosine from it to ``min_lr_ratio``."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Last value of the cosine, as a share of ``lr``."""
    warmup_steps: int = Field(default=10, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay, on matrices only."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    moments: Literal["float32", "bfloat16", "8bit"] = "float32"
    """In what AdamW keeps its two moments of each parameter: 8 bytes (``float32``), 4
    (``bfloat16``) or about 2 (``8bit``, of matrices whose rows are multiples of 64). The last two
    take the extra ``lowbit`` and a compiler."""
    offload: Literal["none", "moments", "parameters"] = "none"
    """State of a rank on a GPU in host memory: AdamW's moments, which each step copies to the GPU
    and back (``moments``); or master weights, gradients and moments, so that the step is computed
    on the CPU and the GPU has one block's weights at a time (``parameters``). No effect on a CPU
    that trains."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A step with a loss or gradient that is not finite ends the run with exit code 1 (``stop``),
    or changes no weight, and its samples are dead letters (``skip``)."""
    max_skipped: Count = 3
    """Maximum of consecutive skipped steps; one more ends the run."""
    tokens_per_micro_batch: Count = 16384
    """Maximum of prompt plus response tokens in one forward pass; samples are packed without
    padding. ``context_parallel`` ranks share them."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward pass; master weights are float32. ``auto`` as for the engines."""
    export_dtype: ExportDtype = "auto"
    """Precision of the model that the run writes (``model/``, ``best/``, copies for a teacher that
    is the student itself). ``auto``: ``bfloat16`` if the student's own config.json names a 16-bit
    type, else ``float32``. Checkpoints always have the float32 masters. Engines in float32, as on a
    CPU, evaluate weights that are not rounded: a few of their answers differ from this model's."""
    attention: Literal["auto", "varlen", "flash", "flex", "sdpa"] = "auto"
    """The attention on a GPU: torch's ``varlen``; ``flash``, of the package flash-attn;
    torch's ``flex``; or ``sdpa`` with a mask of each whole packed row, which takes memory quadratic
    in it. ``auto`` is the first of varlen, flash and flex that computes all that the student's
    attention needs (docs/objectives.md). A CPU has ``sdpa`` only:
    by ``auto`` of one sequence after the other, where the student allows it."""
    gradient_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Which activations the backward pass computes again. ``full``: all of a layer but its input,
    for about a third more time; ``selective``: all but the results of matrix products and of
    attention, for a few percent. ``true`` and ``false`` are ``full`` and ``none``. ``auto``:
    on GPUs the least whose planned memory fits 0.85 of one (``async_opd check`` shows which), and
    ``full`` where their memory is not known, if transformers can recompute the student's layers
    (run.log says where it cannot): 16,384 tokens of a 4B student leave more than 46 GB."""
    ranks: Count = 1
    """Processes that train in lock-step, each on its own GPU. Student, gradients and optimizer are
    sharded over them (FSDP2)."""
    compile: bool | Literal["auto"] = "auto"
    """Has torch compile the student's decoder layers (docs/training.md), which takes up to minutes
    at the start. Layers that cannot be compiled run eagerly, as run.log then says. Not for mixtures
    of experts. ``auto``: on GPUs, where the other keys of this section allow it and so
    does the student, if its files are on the driver's machine."""
    reduce_gradients: Literal["auto", "step", "micro_batch"] = "auto"
    """When several ranks sum their gradients: once a step, for which each has the full gradients in
    float32 meanwhile, or after each micro-batch, which moves them as often. ``auto``: once a step
    where they take at most an eighth of the memory of every rank."""
    context_parallel: Count = 1
    """Ranks that share every row, for responses whose activations do not fit into one: each
    computes its part of the tokens, and attention exchanges heads (docs/objectives.md)."""
    replicate: Count = 1
    """Copies of the shards (HSDP): parameters are gathered within ``ranks / replicate`` ranks,
    those of one node, and only gradients are summed over all."""
    threads: Count | Literal["auto"] = "auto"
    """CPU threads of each rank. ``auto`` on a CPU: the cores beside the engines, divided by the
    ranks, but at least two cores, and one thread for a student below 10 million parameters; on
    GPUs 1, or with ``offload: parameters`` all cores, divided by the ranks."""
    routing: Literal["own", "replay"] = "own"
    """Experts of a mixture's tokens: the trainer's routers choose them, or take those that the
    engine chose while it sampled (``replay``, docs/mixtures.md); the latter on GPUs only."""
    freeze: list[Literal["vision_tower", "projector"]] = Field(default_factory=list)
    """Parts of a VLM student that are not trained: they have no gradients and moments, and
    neither syncs nor checkpoints have them. Adapters (``lora``) freeze both."""
    lora: LoraConfig | None = None
    """Trains adapters of low rank instead of all weights; needs the extra ``lora`` (peft)."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """TFLOP/s of a rank's device, of which ``train/mfu`` is the share; by default the data sheet's
    dense bfloat16 rate by the GPU's name. For a device that is not known there is no
    ``train/mfu``."""

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _yes_is_full(cls, value: Any) -> Any:
        return {True: "full", False: "none"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Self:
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError("'steps' or 'epochs', not both")
        return self

    @model_validator(mode="after")
    def _compiled_layers_are_alone(self) -> Self:
        wrong = {
            "'context_parallel': a graph holds no exchange with other ranks": (
                self.context_parallel > 1
            ),
            "'routing' replay: a graph holds no experts of the engine's": self.routing == "replay",
        }
        if self.compile is True and any(wrong.values()):
            found = "; ".join(name for name, chosen in wrong.items() if chosen)
            raise ValueError(f"'compile' with {found}")
        return self

    @model_validator(mode="after")
    def _moments_can_decay(self) -> Self:
        if self.moments == "bfloat16" and max(self.betas) > MAX_BFLOAT16_BETA:
            raise ValueError(
                f"'moments' bfloat16 with 'betas' {self.betas}: above {MAX_BFLOAT16_BETA} its 8 "
                "significant bits round away how moments decay"
            )
        return self

    @property
    def shards(self) -> int:
        """Parts of the student, its gradients and its optimizer: a rank has one of them."""
        return self.ranks // self.replicate

    def mesh_faults(self) -> Iterator[tuple[str, str, str]]:
        """Dimensions that ``ranks`` cannot have: (dotted key, fault, remedy)."""
        whole = self.replicate * self.context_parallel
        if self.ranks % whole:
            product = f"train.replicate × train.context_parallel ({whole})"
            fault = f"found {self.ranks}, expected a multiple of {product}"
            yield "train.ranks", fault, f"for example {-(-self.ranks // whole) * whole}"
        if self.lora is not None and self.offload == "parameters":
            fault = "found parameters with train.lora: adapters are merged where the weights are"
            yield "train.offload", fault, "set it to moments or none"
