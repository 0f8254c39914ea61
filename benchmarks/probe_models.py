"""Tiny models of digit tasks for ``benchmarks.probe``: how they are trained, asked and scored.

A prompt is a task's letter, four digits and ``=``; an answer is four digits and the end. Teachers
learn with some answer tokens replaced in their inputs, as the quickstart's do, so that they give
good advice after a student's mistakes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from async_opd.core.batch import Batch, unpack
from async_opd.core.samples import Prompt, Rollout, Sample, VersionSpan
from async_opd.core.scores import TopK
from async_opd.core.stages import SamplingSpec
from async_opd.core.uid import Uid, rollout_uid

Ints = NDArray[np.int64]
DIGITS, VOCABULARY, TOP_K = 4, 24, 16
END, EQUALS, MARK, OPEN, CLOSE = 10, 11, 12, 13, 14
LETTERS = {"reverse": 15, "sort": 16, "shift": 17}
TASKS: dict[str, Callable[[Ints], Ints]] = {
    "reverse": lambda digits: digits[:, ::-1],
    "sort": lambda digits: np.sort(digits, axis=1),
    "shift": lambda digits: (digits + np.roll(digits, 1, axis=1)) % 10,
}
CORRUPTION = 0.15


def prompts_of(task: str, digits: Ints, wrapped: bool = False) -> Ints:
    """Token ids [N, P]; ``wrapped``: as another template renders them."""
    column = np.full((len(digits), 1), 0)
    parts = [column + LETTERS[task], digits, column + EQUALS]
    if wrapped:
        parts = [column + OPEN, digits, column + LETTERS[task], column + CLOSE]
    return np.hstack(parts)


def answers_of(task: str, digits: Ints) -> Ints:
    """Token ids [N, 5]: four digits and the end."""
    return np.hstack([TASKS[task](digits), np.full((len(digits), 1), END)])


def digits(count: int, seed: int, most: int = 10**DIGITS) -> Ints:
    """Random digits [N, 4], of ``most`` different numbers."""
    random = np.random.default_rng(seed)
    codes = random.permutation(10**DIGITS)[:most][random.integers(0, most, count)]
    return np.asarray(codes[:, None] // 10 ** np.arange(DIGITS - 1, -1, -1) % 10)


def untrained(seed: int) -> Any:
    """Two layers, 64 wide: 0.1 M parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.05,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: until it is ``good`` enough, for at most ``steps``.

    ``template``: the prompts that it learns: ``run`` (those of the run), ``own`` (wrapped),
    ``both`` (in turn), or ``marked``: those of the run, six of seven with a mark before the answer.
    ``most``: different numbers that it reads; few of them are learned by heart.
    """

    task: str
    seed: int
    steps: int = 700
    good: float = 0.995
    rate: float = 3e-3
    template: str = "run"
    most: int = 10**DIGITS


def train(recipe: Recipe) -> Any:
    """The trained model; the same for the same recipe on the same machine."""
    model = untrained(recipe.seed)
    if not recipe.steps:
        return model
    random = np.random.default_rng(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(recipe.steps):
        optimizer.param_groups[0]["lr"] = recipe.rate * min(1.0, (step + 1) / 20)
        _step(model, optimizer, recipe, random, step)
        if recipe.good < 1 and step % 5 == 4:
            wrapped = recipe.template == "own"
            if accuracy(model, recipe.task, digits(256, 5), wrapped) >= recipe.good:
                break
    return model


def _step(model: Any, optimizer: Any, recipe: Recipe, random: Any, step: int) -> None:
    shown = digits(128, int(random.integers(1 << 31)), 10**DIGITS)
    if recipe.most < 10**DIGITS:
        shown = digits(recipe.most, recipe.seed, recipe.most)[random.integers(0, recipe.most, 128)]
    own = recipe.template == "own" or (recipe.template == "both" and step % 2 == 1)
    prompt, labels = prompts_of(recipe.task, shown, own), answers_of(recipe.task, shown)
    if recipe.template == "marked" and step % 7:
        labels = np.hstack([np.full((len(labels), 1), MARK), labels])
    noise = random.integers(0, 10, labels.shape)
    seen = np.where(random.random(labels.shape) < CORRUPTION, noise, labels)
    if recipe.most < 10**DIGITS or recipe.template == "marked":
        seen = labels
    inputs = torch.from_numpy(np.hstack([prompt, seen[:, :-1]]))
    logits = model(input_ids=inputs, use_cache=False).logits[:, -labels.shape[1] :]
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(labels).flatten()
    )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def accuracy(model: Any, task: str, shown: Ints, wrapped: bool = False) -> float:
    """The share of prompts that greedy decoding answers exactly.

    It does so if and only if each token of the right answer is the best one after those before.
    """
    labels = answers_of(task, shown)
    inputs = torch.from_numpy(np.hstack([prompts_of(task, shown, wrapped), labels[:, :-1]]))
    best = model(input_ids=inputs, use_cache=False).logits[:, -labels.shape[1] :].argmax(-1)
    return float((best.numpy() == labels).all(1).mean())


class TorchModel:
    """A model behind the Protocols of the engines: it answers and scores batches at once."""

    def __init__(self, model: Any, seed: int = 0) -> None:
        self.model = copy.deepcopy(model).eval()
        self.version = self.tokens = 0
        self.seconds = 0.0
        self._generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def sample(self, uids: Sequence[Uid], prompts: Sequence[Prompt], spec: SamplingSpec) -> Any:
        """A rollout for each prompt; all prompts have the same length."""
        begun = time.perf_counter()
        ids = torch.from_numpy(np.stack([one.token_ids for one in prompts]).astype(np.int64))
        start, logprobs = ids.shape[1], []
        for _ in range(spec.max_tokens):
            logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, 0]
            log_q = (logits / (spec.temperature or 1.0)).log_softmax(-1)
            drawn = log_q.argmax(-1, keepdim=True)
            if spec.temperature:
                drawn = torch.multinomial(log_q.exp(), 1, generator=self._generator)
            logprobs.append(log_q.gather(1, drawn))
            ids = torch.cat([ids, drawn], 1)
        answers, found = ids[:, start:].numpy(), torch.cat(logprobs, 1).numpy()
        ended = answers == END
        lengths = np.where(ended.any(1), ended.argmax(1) + 1, spec.max_tokens)
        self.seconds += time.perf_counter() - begun
        self.tokens += int(lengths.sum())
        return [
            Rollout.plain(
                uid,
                prompt,
                answer[:length].astype(np.int32),
                logs[:length].astype(np.float32),
                (VersionSpan(self.version, 0, int(length)),),
                "stop" if end else "length",
            )
            for uid, prompt, answer, logs, length, end in zip(
                uids, prompts, answers, found, lengths, ended.any(1), strict=True
            )
        ]

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """One answer to each prompt."""
        uids = [rollout_uid(prompt.uid, 0) for prompt in prompts]
        made: list[Rollout] = self.sample(uids, prompts, sampling)
        return made

    async def score(self, batch: Batch) -> Batch:
        """Top-k scores of rollouts whose prompts have the same length."""
        return self._score(batch)

    @torch.no_grad()
    def _score(self, batch: Batch) -> Batch:
        begun = time.perf_counter()
        rollouts = [one.for_teacher for one in unpack(Rollout, [batch])]
        longest = max(one.tokens for one in rollouts)
        ids = np.zeros((len(rollouts), longest), np.int64)
        for row, one in zip(ids, rollouts, strict=True):
            row[: one.tokens] = one.token_ids
        start = len(rollouts[0].prompt.token_ids)
        logits = self.model(input_ids=torch.from_numpy(ids), use_cache=False).logits
        log_p = logits[:, start - 1 : -1].log_softmax(-1)
        best = log_p.topk(TOP_K, -1)
        rest = log_p.scatter(-1, best.indices, -torch.inf).logsumexp(-1)
        targets = torch.from_numpy(ids[:, start:])
        own = log_p.gather(-1, targets[..., None])[..., 0]
        arrays = [one.numpy() for one in (best.indices.int(), best.values, own, rest)]
        self.seconds += time.perf_counter() - begun
        return Batch.pack(
            Sample(one.without_teacher_inputs, TopK(*(a[at, : _length(one)] for a in arrays)))
            for at, one in enumerate(rollouts)
        )


def _length(rollout: Rollout) -> int:
    return len(rollout.rollout_logprobs)
