"""Tiny Qwen3 models for the quickstart: one tokenizer, and the training of teachers and student."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tasks import DIGITS, PROMPT_SUFFIX, Ints, Split, answer_digits, digits_of, prompt_prefix
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
VOCABULARY_SIZE = 128
MAX_LENGTH = 128
_CHARACTERS = [PAD, BOS, EOS, UNK, *map(chr, range(32, 127)), "\n", "\t"]
VOCABULARY: tuple[str, ...] = (
    *_CHARACTERS,
    *(f"<unused_{i}>" for i in range(VOCABULARY_SIZE - len(_CHARACTERS))),
)
_ID = {token: i for i, token in enumerate(VOCABULARY)}

BATCH_SIZE = 128
CORRUPTION = 0.15
"""Share of answer tokens shown as a random digit. The next tokens must still be right, so a teacher
also gives good advice after a student's mistake, and ends the answer at the right length."""
ENDINGS = 3
"""End-of-sequence labels after each answer, so that one corrupted ending is followed by others."""

# transformers does not annotate these two.
_new_tokenizer: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
_new_model: Callable[[Qwen3Config], Qwen3ForCausalLM] = Qwen3ForCausalLM

Report = Callable[[int, str], None]
"""Called, now and then, with the number of steps done and a text about the progress."""


@dataclass(frozen=True)
class Band:
    """The greedy accuracies between which an under-trained student may stop."""

    low: float = 0.10
    target: float = 0.15
    high: float = 0.22


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters: printable ASCII, no merges, nothing added or stripped."""
    core = Tokenizer(models.BPE(vocab=dict(_ID), merges=[], unk_token=UNK))
    core.decoder = decoders.Fuse()
    return _new_tokenizer(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(seed: int) -> Qwen3ForCausalLM:
    """An untrained model of 0.34 M parameters, the same shape for teachers and student."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=_ID[PAD],
        bos_token_id=_ID[BOS],
        eos_token_id=_ID[EOS],
    )
    return _new_model(config)


def _token_ids(text: str, n: int) -> Ints:
    return np.tile([_ID[c] for c in text], (n, 1))


def make_batch(
    task: str, codes: Ints, endings: int, rng: np.random.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Model inputs and labels for these codes; the labels belong to the last input positions.

    With an `rng`, answer tokens are corrupted in the inputs, never in the labels.
    """
    n, zero = len(codes), _ID["0"]
    digits = digits_of(codes)
    ending = np.full((n, endings), _ID[EOS])
    labels = np.concatenate([answer_digits(task, digits) + zero, ending], axis=1)
    shown = labels
    if rng is not None:
        noise = rng.integers(0, 10, labels.shape) + zero
        shown = np.where(rng.random(labels.shape) < CORRUPTION, noise, labels)
    prefix, suffix = _token_ids(prompt_prefix(task), n), _token_ids(PROMPT_SUFFIX, n)
    inputs = np.concatenate([prefix, digits + zero, suffix, shown[:, :-1]], axis=1)
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def _logits(model: Qwen3ForCausalLM, inputs: torch.Tensor, positions: int) -> torch.Tensor:
    logits = model(input_ids=inputs, use_cache=False, logits_to_keep=positions).logits
    assert isinstance(logits, torch.Tensor)
    return logits


@torch.no_grad()
def accuracy(model: Qwen3ForCausalLM, task: str, codes: Ints) -> float:
    """The share of prompts that greedy decoding answers exactly, end of sequence included.

    Greedy decoding is right from start to end if and only if the best token is right at every
    position of the right answer, so one forward pass is enough.
    """
    inputs, labels = make_batch(task, codes, endings=1)
    best = _logits(model, inputs, DIGITS + 1).argmax(-1)
    return float((best == labels).all(dim=1).double().mean())


class _Fitter:
    """Supervised training on fresh random prompts: one optimizer, one stream of batches."""

    def __init__(self, model: Qwen3ForCausalLM, lr: float, warmup: int, seed: int) -> None:
        self.model, self.lr, self.warmup = model, lr, warmup
        self.rng = np.random.default_rng(seed)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.steps = 0

    def step(self, splits: dict[str, Split], batch_size: int, decay: float = 1.0) -> None:
        """One optimizer step with `batch_size` prompts of every task in `splits`."""
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = self.lr * min(decay, self.steps / self.warmup)
        for task, part in splits.items():
            codes = self.rng.choice(part.pretraining, batch_size)
            inputs, labels = make_batch(task, codes, ENDINGS, self.rng)
            logits = _logits(self.model, inputs, labels.shape[1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            torch.autograd.backward(loss / len(splits))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def train_teacher(
    task: str, part: Split, seed: int, steps: int, report: Report
) -> Qwen3ForCausalLM:
    """A teacher that masters `task` and has never seen another one."""
    model = make_model(seed)
    fitter = _Fitter(model, lr=3e-3, warmup=20, seed=seed)
    for step in range(steps):
        decay = max(0.02, min(1.0, (steps - step) / (0.4 * steps)))
        fitter.step({task: part}, BATCH_SIZE, decay)
        if fitter.steps % 10 == 0 or fitter.steps == steps:
            note = f"{task} {accuracy(model, task, part.held_out[:512]):.1%}"
            report(fitter.steps, note)
    return model


def train_student(
    splits: dict[str, Split], seed: int, max_steps: int, band: Band, report: Report
) -> Qwen3ForCausalLM:
    """A student that knows what an answer looks like and is seldom right, on every task.

    Tasks are learned at very different speeds: a task at its target rests until it falls below.
    """
    model = make_model(seed)
    fitter = _Fitter(model, lr=1e-3, warmup=10, seed=seed)
    seen = dict.fromkeys(splits, 0.0)
    while not all(band.low <= value <= band.high for value in seen.values()):
        if fitter.steps == max_steps:
            raise RuntimeError(f"the student is still at {seen} after {max_steps} steps")
        late = {task: part for task, part in splits.items() if seen[task] < band.target}
        fitter.step(late, BATCH_SIZE // len(splits))
        seen = {t: accuracy(model, t, part.held_out[:512]) for t, part in splits.items()}
        report(fitter.steps, " ".join(f"{task} {value:.1%}" for task, value in seen.items()))
    return model


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the weights, rounded to bfloat16, with the tokenizer and both configurations."""
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure(
    folder: Path, splits: dict[str, Split], part: Literal["eval", "held_out"]
) -> dict[str, float]:
    """The accuracies of saved weights on every task, over one part of its split."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {
        task: round(accuracy(model, task, getattr(codes, part)), 4)
        for task, codes in splits.items()
    }
