"""The inputs of objectives: the response tokens of a micro-batch, with weights and scores.

N: response tokens, V: the student's vocabulary, k: tokens of a top-k support. ``q`` is the student
under its current weights, ``p`` the teacher, ``mu`` the distribution that was sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from async_opd.config.user_code import LOSS_GROUP, UserCodeError, fits, user_object

Change = Callable[[torch.Tensor], torch.Tensor]
Slopes = tuple[torch.Tensor, torch.Tensor]
"""(value [n], slope [n, K]): a loss per token, and its partial derivative by each log q_i. Partial:
each log q_i depends on all logits, which ``rows.py`` accounts for."""


class DivergenceFunction(Protocol):
    """A divergence of two distributions over the same K outcomes, log p and log q [n, K]."""

    def __call__(self, log_p: torch.Tensor, log_q: torch.Tensor) -> Slopes: ...


def user_divergence(name: str, options: Mapping[str, Any]) -> DivergenceFunction:
    """The divergence of a user's package, whose slopes are those of its values.

    Two rows of three outcomes are evaluated in float64, and the slopes compared with central
    differences. UserCodeError for what cannot be loaded or called, and for wrong shapes or slopes.
    """
    function = user_object(name, LOSS_GROUP)
    log_p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], dtype=torch.float64).log()
    log_q = torch.tensor([[0.2, 0.7, 0.1], [0.6, 0.3, 0.1]], dtype=torch.float64).log()
    fits(function, name, log_p, log_q, **options)
    divergence = partial(function, **options)
    try:
        value, slope = divergence(log_p.clone(), log_q.clone())
        shapes = (tuple(value.shape), tuple(slope.shape))
        if shapes != ((2,), (2, 3)):
            raise UserCodeError(
                f"{name} returned shapes {shapes} for two rows of three outcomes, "
                "expected values [2] and slopes [2, 3]"
            )
        expected = torch.empty_like(slope)
        for outcome in range(3):
            moved = torch.zeros_like(log_q)
            moved[:, outcome] = 1e-5
            above, _ = divergence(log_p.clone(), log_q + moved)
            below, _ = divergence(log_p.clone(), log_q - moved)
            expected[:, outcome] = (above - below) / 2e-5
    except UserCodeError:
        raise
    except (Exception, SystemExit) as error:  # of the user's code, which can raise anything
        raise UserCodeError(
            f"{name} failed on two rows: {type(error).__name__}: {error}"
        ) from error
    if not torch.allclose(slope, expected, rtol=1e-4, atol=1e-6):
        raise UserCodeError(
            f"{name} returned slopes {slope.tolist()}, but its values change by "
            f"{expected.tolist()} per unit of log q: return the partial derivative by each log q"
        )
    return divergence


@dataclass(frozen=True)
class TeacherStates:
    """Final hidden states [n, H] of one teacher, for the rows from ``start`` on."""

    teacher: str
    start: int
    states: torch.Tensor

    @property
    def rows(self) -> slice:
        """The rows of the micro-batch that these states predict."""
        return slice(self.start, self.start + len(self.states))


class Kept(NamedTuple):
    """Rows ``start <= i < stop``; the first is token ``first`` of the response of ``sample``."""

    sample: int
    first: int
    start: int
    stop: int


@dataclass(frozen=True)
class Recorded:
    """The rows that are recorded, in order, with the ``k`` most probable tokens of each."""

    rows: tuple[Kept, ...]
    k: int

    def part(self, rows: slice) -> Recorded:
        """The part of it in these rows, counted from their start."""
        cut = []
        for one in self.rows:
            start, stop = max(one.start, rows.start), min(one.stop, rows.stop)
            if start < stop:
                first = one.first + start - one.start
                cut.append(Kept(one.sample, first, start - rows.start, stop - rows.start))
        return replace(self, rows=tuple(cut))

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The recorded rows of values [n, …]."""
        return torch.cat([values[:0], *(values[one.start : one.stop] for one in self.rows)])


@dataclass(frozen=True)
class Tokens:
    """Response tokens; every tensor has one row each.

    ``targets`` int64 [N] the sampled tokens and ``rollout_logprobs`` [N] log mu of them;
    ``weights`` [N] their weights in the distillation loss, ``reward_weights`` [N] in the reward's;
    ``advantages`` [N] where there is a reward. Each response is complete:
    ``response_starts`` int64 [N] is the row (in the micro-batch) of the first token of a token's
    response, ``response_log_ratios`` float64 [N] log q/mu of that whole response
    (``chunked.py``). Where several ranks share a micro-batch, ``of`` is the number of its tokens
    on all of them, and ``response_starts`` counts in these. ``owners`` int32 [N] are indices in
    ``Packed.owners``, for metrics. ``fresh`` bool [N]: the whole response was sampled under the
    weights that are trained (``losses.mismatch``). ``masked`` bool [N]: the token is too old for
    the distillation loss, where it weighs 0, and for its means; None if there is no bound.
    ``recorded`` where rows are recorded (``trainer.recorder``). Of the teacher:
    ``teacher_logprobs`` [N] of the sampled tokens, and of a top-k support ``teacher_ids`` int64 and
    ``teacher_topk_logprobs`` [N, k], and ``teacher_rest_logprobs`` [N], the logarithm of the mass
    outside of it; or ``teacher_states``, which cover all rows in order.
    """

    targets: torch.Tensor
    rollout_logprobs: torch.Tensor
    weights: torch.Tensor
    teacher_logprobs: torch.Tensor | None = None
    teacher_ids: torch.Tensor | None = None
    teacher_topk_logprobs: torch.Tensor | None = None
    teacher_rest_logprobs: torch.Tensor | None = None
    teacher_states: tuple[TeacherStates, ...] = ()
    advantages: torch.Tensor | None = None
    reward_weights: torch.Tensor | None = None
    response_starts: torch.Tensor | None = None
    response_log_ratios: torch.Tensor | None = None
    owners: torch.Tensor | None = None
    fresh: torch.Tensor | None = None
    masked: torch.Tensor | None = None
    of: int | None = None
    recorded: Recorded | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def part(self, rows: slice) -> Tokens:
        """The tokens of these rows, without hidden states and ``of``."""
        own = replace(self, teacher_states=()).map(lambda tensor: tensor[rows])
        recorded = None if self.recorded is None else self.recorded.part(rows)
        return replace(own, of=None, recorded=recorded)

    def map(self, change: Change) -> Tokens:
        """The tokens with every tensor changed, hidden states too."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {
            k: change(v) for k, v in tensors.items() if isinstance(v, torch.Tensor)
        }
        states = (replace(one, states=change(one.states)) for one in self.teacher_states)
        return replace(self, **changed, teacher_states=tuple(states))
