"""Steps of the trainer, which packs, against the same steps with padding, and a plain loop.

    packed    ``Learner.train_batch``: packed rows, the head for response rows only
    padded    the same model, objective and optimizer; sequences padded to the longest of 8, in the
              order in which they arrive
    plain     transformers' model on padded sequences, logits of all tokens, autograd through the
              same loss; all sequences have the same length, so that nothing is padded

A random Qwen3 model (4 layers, hidden 256, vocabulary 2048, so that the head has about the share
of a 4B student), top-64 scores, float32, one thread. Lengths of prompt and response are log-normal
with sigma 1, cut at 16 times the median, or all equal. The forms take turns; ratios are medians of
pairs, of useful tokens (those of samples) per second. ``useless_share`` are tokens that the decoder
computed in packed rows, and which belong to no sample. ``difference`` is the largest relative one
of the losses of all forms, which begin with the same weights.

``python -m benchmarks.trainer`` prints one JSON object last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from async_opd.config.sections.loss import ForwardKLConfig
from async_opd.config.sections.train import TrainConfig
from async_opd.core.samples import Prompt, Rollout, Sample, VersionSpan
from async_opd.core.scores import TopK
from trainer.batches.packing import Packed, pack
from trainer.batches.token_weights import TokenWeight, TokenWeighting
from trainer.learner import Learner
from trainer.losses import build_objective
from trainer.optimizer import adamw
from trainer.rank import Rank
from trainer.recorder import Recorder
from trainer.student.attention_choice import platform_of
from trainer.student.loading import set_attention
from trainer.student.loss_module import StudentLoss
from trainer.student.placed import PlacedStudent

CPU = torch.device("cpu")
VOCABULARY, K, PADDED = 2048, 64, 8
SIGMA, CUT = 1.0, 16
TRAIN = TrainConfig(lr=1e-5, steps=1000, warmup_steps=0)

Step = Callable[[Sequence[Sample]], float]
"""One optimizer step on a batch: its loss."""


def student() -> Any:
    """The same random weights each time."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
    )
    return Qwen3ForCausalLM(config).eval()


def lengths(draw: np.random.Generator, count: int, median: int, equal: bool) -> list[int]:
    """Tokens of samples, at least 8."""
    if equal:
        return [median] * count
    drawn = median * draw.lognormal(0.0, SIGMA, count)
    return [max(int(n), 8) for n in np.minimum(drawn, CUT * median)]


def sample(draw: np.random.Generator, index: int, tokens: int) -> Sample:
    """A quarter of the tokens are the prompt; random scores."""
    response = tokens - tokens // 4
    prompt = Prompt(
        f"p{index}", "s", "t", draw.integers(0, VOCABULARY, tokens // 4, dtype=np.int32)
    )
    support = np.argpartition(draw.random((response, VOCABULARY)), K, axis=1)[:, :K]
    logprobs = np.sort(np.log(draw.dirichlet(np.ones(K), response) * 0.9), axis=1)[:, ::-1]
    own = np.full(response, -8.0, dtype=np.float32)
    rollout = Rollout.plain(
        uid=f"p{index}/0",
        prompt=prompt,
        response_ids=draw.integers(0, VOCABULARY, response, dtype=np.int32),
        rollout_logprobs=own,
        version_spans=(VersionSpan(0, 0, response),),
        finish_reason="stop",
    )
    return Sample(rollout, TopK(support.astype(np.int32), logprobs.astype(np.float32), own))


class Packing:
    """The trainer itself; counts the tokens that its decoder computes."""

    def __init__(self) -> None:
        self.computed = 0
        model = student()
        set_attention(model, "auto", platform_of(CPU, half=False))  # as ``build_rank`` does
        self._rank = Rank(PlacedStudent(model, build_objective(ForwardKLConfig()), TRAIN, CPU))
        self._rank.model.base_model.register_forward_pre_hook(self._count, with_kwargs=True)
        self._learner = Learner(self._rank)

    def record(self, recorder: Recorder | None) -> None:
        """Steps from here on are recorded, or not."""
        self._rank.recorder = recorder

    def step(self, samples: Sequence[Sample]) -> float:
        """See Step."""
        return self._learner.train_batch(samples).metrics["loss/total"]

    def _count(self, decoder: Any, args: Any, named: dict[str, Any]) -> None:
        self.computed += named["input_ids"].numel()


class Padding:
    """Sequences padded to the longest of ``PADDED``; the loss as in the trainer, or plainly."""

    def __init__(self, plain: bool) -> None:
        self._model = student()
        self._student = StudentLoss(self._model, build_objective(ForwardKLConfig()), {})
        self._optimizer = adamw(self._model, TRAIN)
        self._loss = self._plain if plain else self._as_trained
        self._weighting = TokenWeighting()

    def step(self, samples: Sequence[Sample]) -> float:
        """See Step."""
        weights, _ = self._weighting([sample.header for sample in samples])
        total = 0.0
        for start in range(0, len(samples), PADDED):
            group = slice(start, start + PADDED)
            loss = self._loss(samples[group], weights[group])
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), TRAIN.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def _as_trained(
        self, samples: Sequence[Sample], weights: Sequence[TokenWeight]
    ) -> torch.Tensor:
        """Hidden states of the tokens in the order of packing, then the trainer's head."""
        packed = pack(samples, weights)
        ids, mask = _padded(samples)
        states = self._model.model(input_ids=ids, attention_mask=mask, use_cache=False)
        rows = states.last_hidden_state[mask.bool()][packed.rows]
        loss: torch.Tensor = self._student.head(rows, packed.tokens)[0]
        return loss

    def _plain(self, samples: Sequence[Sample], weights: Sequence[TokenWeight]) -> torch.Tensor:
        """Logits of all tokens; top-k and bucket by autograd."""
        packed = pack(samples, weights)
        ids, mask = _padded(samples)
        logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return _kl(logits[mask.bool()][packed.rows], packed)


def _kl(logits: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Forward KL over the teacher's top k and a bucket for the rest, as ``forward_kl``."""
    tokens = packed.tokens
    assert tokens.teacher_ids is not None
    assert tokens.teacher_topk_logprobs is not None
    assert tokens.teacher_rest_logprobs is not None
    log_q = logits.float().log_softmax(-1)
    top = log_q.gather(-1, tokens.teacher_ids)
    rest = log_q.scatter(-1, tokens.teacher_ids, -torch.inf).logsumexp(-1)
    log_p, p_rest = tokens.teacher_topk_logprobs, tokens.teacher_rest_logprobs
    each = (log_p.exp() * (log_p - top)).sum(-1) + p_rest.exp() * (p_rest - rest)
    return (each * tokens.weights.float()).sum()


def _padded(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [n, T], padded on the right, and the mask of the samples' tokens."""
    rollouts = [one.rollout for one in samples]
    longest = max(rollout.tokens for rollout in rollouts)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, rollout in enumerate(rollouts):
        tokens = np.concatenate([rollout.prompt.token_ids, rollout.continuation])
        ids[row, : len(tokens)] = torch.from_numpy(tokens)
        mask[row, : len(tokens)] = 1
    return ids, mask


def seconds(step: Step, samples: Sequence[Sample]) -> tuple[float, float]:
    """CPU seconds of a step, and its loss; of one thread that never waits those of the clock."""
    started = time.process_time()
    loss = step(samples)
    return time.process_time() - started, loss


def compared(one: Step, other: Step, batches: Sequence[Sequence[Sample]]) -> tuple[float, float]:
    """The median over batches of other's seconds over one's; the largest difference of losses.

    The first batch warms both up and is not counted; the losses are its.
    """
    ratios, difference = [], 0.0
    for number, samples in enumerate(batches):
        pair = [(step, seconds(step, samples)) for step in ((one, other), (other, one))[number % 2]]
        found = dict(pair)
        ratio = found[other][0] / found[one][0]
        if number:
            ratios.append(ratio)
            print(f"  {found[one][0]:.2f} s, {found[other][0]:.2f} s: {ratio:.2f}", flush=True)
        else:
            difference = abs(found[other][1] - found[one][1]) / abs(found[one][1])
    return statistics.median(ratios), difference


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, value in (("batch", 32), ("median", 64), ("pairs", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    sizes = parser.parse_args()
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)

    def batches(equal: bool) -> list[list[Sample]]:
        return [
            [
                sample(draw, index, tokens)
                for index, tokens in enumerate(lengths(draw, sizes.batch, sizes.median, equal))
            ]
            for _ in range(sizes.pairs + 1)
        ]

    uneven, even = batches(False), batches(True)
    packing = Packing()
    print("padded against packed, log-normal lengths", flush=True)
    over_padded, first = compared(packing.step, Padding(plain=False).step, uneven)
    useful = sum(one.rollout.tokens for samples in uneven for one in samples)
    print("plain against packed, equal lengths", flush=True)
    over_plain, second = compared(Packing().step, Padding(plain=True).step, even)
    found = {
        "packed_over_padded": round(over_padded, 2),
        "useless_share": round(1 - useful / packing.computed, 4),
        "plain_loop_ratio": round(over_plain, 2),
        "difference": max(first, second),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
