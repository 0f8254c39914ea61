"""AdamW over the student's parameters: moments in float32, in bfloat16, or in 8 bits.

    gradient ──► moments, as they are kept ──► float32 ──► new moments ──► parameter
                        ▲                                      │
                        └───────────── rounded ────────────────┘

The moments are plain tensors, sharded by rows as their parameter: a checkpoint stores them as they
are. One in 8 bits (torchao's ``OptimState8bit``, after arXiv 2110.02861) is two of them: ``codes``,
a byte for each entry, and ``scale``, the largest magnitude of each block of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from async_opd.core.errors import StageError
from async_opd.core.stages import TRAINER
from async_opd.models.model_size import Moments, block_of
from trainer.offload import HostMoments

if TYPE_CHECKING:
    from async_opd.config.device_defaults import Offload
    from async_opd.config.sections.train import TrainConfig

EPSILON = 1e-8
FIRST, SECOND = "exp_avg", "exp_avg_sq"


def adamw(model: Any, train: TrainConfig, offload: Offload = "none") -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, with weight decay on matrices only.

    With ``offload`` ``moments`` these are in host memory between two steps. StageError if
    ``train.moments`` needs compiled kernels and none can be made here.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    made: torch.optim.Optimizer
    if train.moments == "float32":
        made = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=EPSILON, fused=True)
    else:
        update = compiled_update(next(model.parameters()).device)
        made = LowBitAdamW(groups, train.lr, train.betas, train.moments, update)
    return HostMoments(made) if offload == "moments" else made


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW that computes in float32 and rounds its moments to the nearest value they can have."""

    def __init__(
        self,
        groups: Any,
        lr: float,
        betas: tuple[float, float],
        moments: Moments,
        update: Callable[..., None],
    ) -> None:
        """``update`` has the signature of torchao's ``single_param_adam``."""
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})
        self._moments = moments
        self._update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step with the gradients; a parameter without one keeps its value and moments.

        StageError if a kernel cannot be compiled.
        """
        from torch._dynamo.utils import disable_cache_limit

        with disable_cache_limit(), _compiling():  # one kernel for each shape
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step(parameter, group)

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(_zeros(parameter, self._moments))
        state["step"] += 1
        own, gradient = _local(parameter.detach()), _local(parameter.grad)
        if not own.numel():  # a rank without rows of it
            return
        moments = [_opened(state, name) for name in (FIRST, SECOND)]
        rate, decay = torch.tensor(group["lr"]), group["weight_decay"]
        betas = group["betas"]
        self._update(
            own, gradient, state["step"], *moments, None, rate, *betas, decay, EPSILON, True, False
        )


def compiled_update(device: torch.device) -> Callable[..., None]:
    """torchao's AdamW of one tensor as one kernel; it was compiled for the device and run once.

    StageError if it cannot be.
    """
    from torchao.optim.adam import single_param_adam

    update: Callable[..., None] = torch.compile(single_param_adam, fullgraph=True, dynamic=False)
    tried = torch.nn.Parameter(torch.zeros(8, 8, device=device))
    tried.grad = torch.zeros_like(tried)
    LowBitAdamW([{"params": [tried]}], 0.0, (0.9, 0.9), "bfloat16", update).step()
    return update


@contextmanager
def _compiling() -> Iterator[None]:
    """Turns an error of the compiler into one that says what to do."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        first = " ".join(str(error).split("\n")[:2])
        raise StageError(
            TRAINER,
            f"AdamW with low-bit moments cannot be compiled: {type(error).__name__}: {first}",
            "it needs a C++ compiler on a CPU, Triton on a GPU; train.moments: float32 needs none",
        ) from error


def _zeros(parameter: torch.Tensor, moments: Moments) -> Iterator[tuple[str, torch.Tensor]]:
    """The state of a parameter before its first step."""
    parameter = parameter.detach()
    block = block_of(parameter.shape) if moments == "8bit" else None
    yield "step", torch.tensor(0.0)
    for name in (FIRST, SECOND):
        if block is not None:
            blocks = parameter[..., : parameter.shape[-1] // block]
            yield f"{name}/codes", torch.zeros_like(parameter, dtype=torch.uint8)
            yield f"{name}/scale", torch.zeros_like(blocks, dtype=torch.float32)
        else:
            dtype = torch.bfloat16 if moments == "bfloat16" else torch.float32
            yield name, torch.zeros_like(parameter, dtype=dtype)


def _opened(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """This rank's rows of a moment, as ``single_param_adam`` reads and writes them."""
    if name in state:
        return _local(state[name])
    from torchao.optim.subclass_8bit import OptimState8bit, get_qmap_signed, get_qmap_unsigned

    codes, scale = _local(state[f"{name}/codes"]), _local(state[f"{name}/scale"])
    signed = name == FIRST
    values = torch.tensor(get_qmap_signed() if signed else get_qmap_unsigned())
    opened: torch.Tensor = OptimState8bit(
        codes, scale.view(-1), values.to(codes.device), signed, torch.float32
    )
    return opened


def _local(tensor: Any) -> torch.Tensor:
    """This rank's rows."""
    own: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own
