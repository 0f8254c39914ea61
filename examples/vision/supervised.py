"""Supervised training of the tiny models: a teacher masters its tasks, a student does not."""

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pictures
import sorting
import tiny
import torch
from numpy.typing import NDArray
from PIL import Image

TASKS = (*pictures.TASKS, sorting.TASK)
BATCH_SIZE = 144
CORRUPTION = 0.15
"""Share of answer tokens shown as a random character of an answer. The next tokens must still be
right, so a teacher also gives good advice after a student's mistake, and ends the answer."""
ENDINGS = 2
"""End-of-turn labels after each answer, so that one corrupted ending is followed by another."""
LETTERS = "".join(sorted(set("".join(pictures.SHAPES))))
IGNORED = -100

Question = tuple[str, str, Image.Image | None]
"""Text, answer and picture."""
Report = Callable[[int, str], None]
"""Called, now and then, with the number of steps done and a text about the progress."""


@dataclass(frozen=True)
class Band:
    """The greedy accuracies between which an under-trained student may stop."""

    low: float = 0.12
    target: float = 0.24
    high: float = 0.34


def questions(task: str, number: int, rng: np.random.Generator) -> list[Question]:
    """Questions of a task that are in no file: fresh pictures, or codes kept back."""
    if task == sorting.TASK:
        codes = rng.choice(sorting.codes()[sorting.IN_FILES :], number)
        return [(*sorting.question(int(code)), None) for code in codes]
    text, draw = pictures.TASKS[task]
    return [(text, answer, picture) for picture, answer in (draw(rng) for _ in range(number))]


def pixels(drawn: Sequence[Image.Image]) -> torch.Tensor:
    """The models' processor's result for pictures: float32 [patches of all, 3 * 2 * 8 * 8]."""
    merged, patch = tiny.GRID // tiny.MERGE, tiny.PATCH
    found: NDArray[np.float32] = np.stack([np.asarray(one) for one in drawn]).astype(np.float32)
    found = found / np.float32(127.5) - np.float32(1)
    found = found.reshape(-1, merged, tiny.MERGE, patch, merged, tiny.MERGE, patch, 3)
    found = found.transpose(0, 1, 4, 2, 5, 7, 3, 6).reshape(-1, 3, 1, patch, patch)
    return torch.from_numpy(np.repeat(found, 2, axis=2).reshape(len(found), -1))


def _prompt(text: str, picture: Image.Image | None) -> list[int]:
    """Token ids of a prompt as template and processor make them."""
    image = ["<|image_pad|>"] * tiny.IMAGE_TOKENS
    seen = ["<|vision_start|>", *image, "<|vision_end|>"] if picture else []
    return [tiny.ID[one] for one in ("<|user|>", *seen, *text, "<|end|>", "<|assistant|>")]


def batch(
    asked: Sequence[Question], endings: int, rng: np.random.Generator | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Model inputs, and labels [N, T] of the token after each, `IGNORED` in prompts and padding.

    With an `rng`, answer tokens are corrupted in the inputs, never in the labels.
    """
    inputs, labels = [], []
    for text, answer, picture in asked:
        prompt = _prompt(text, picture)
        right = [*(tiny.ID[one] for one in answer), *[tiny.ID["<|end|>"]] * endings]
        shown = right if rng is None else _corrupted(right, answer.isdigit(), rng)
        inputs.append(torch.tensor(prompt + shown[:-1]))
        labels.append(torch.tensor([IGNORED] * (len(prompt) - 1) + right))
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(inputs, batch_first=True, padding_value=tiny.ID["<pad>"])
    made = {"input_ids": ids}
    if drawn := [picture for *_, picture in asked if picture]:
        grid = torch.tensor([[1, tiny.GRID, tiny.GRID]] * len(drawn))
        kinds = (ids == tiny.ID["<|image_pad|>"]).int()
        made |= {"pixel_values": pixels(drawn), "image_grid_thw": grid, "mm_token_type_ids": kinds}
    return made, pad(labels, batch_first=True, padding_value=IGNORED)


def _corrupted(right: Sequence[int], digits: bool, rng: np.random.Generator) -> list[int]:
    """Tokens of which some are random digits, or random letters of answers."""
    others = string.digits if digits else LETTERS
    return [
        tiny.ID[str(rng.choice(list(others)))] if rng.random() < CORRUPTION else one
        for one in right
    ]


def _hidden(model: tiny.Model, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    found = model.model(**inputs, use_cache=False).last_hidden_state
    assert isinstance(found, torch.Tensor)
    return found


@torch.no_grad()
def accuracy(model: tiny.Model, asked: Sequence[Question]) -> float:
    """The share of questions that greedy decoding answers exactly, end of turn included.

    Greedy decoding is right from start to end if and only if the best token is right at every
    position of the right answer, so one forward pass is enough.
    """
    inputs, labels = batch(asked, endings=1)
    best = model.lm_head(_hidden(model, inputs)).argmax(-1)
    return float(((best == labels) | (labels == IGNORED)).all(dim=1).double().mean())


def measure(model: tiny.Model, asked: Mapping[str, Sequence[Question]]) -> dict[str, float]:
    """The accuracy of each task."""
    return {task: round(accuracy(model, some), 4) for task, some in asked.items()}


class _Fitter:
    """Supervised training on fresh questions: one optimizer, one stream of batches."""

    def __init__(self, model: tiny.Model, lr: float, warmup: int, seed: int) -> None:
        self.model, self.lr, self.warmup = model, lr, warmup
        self.rng = np.random.default_rng(seed)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.steps = 0

    def step(self, asked: Sequence[Question], decay: float = 1.0) -> None:
        """One optimizer step on these questions."""
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = self.lr * min(decay, self.steps / self.warmup)
        inputs, labels = batch(asked, ENDINGS, self.rng)
        kept = labels != IGNORED
        logits = self.model.lm_head(_hidden(self.model, inputs)[kept])
        torch.autograd.backward(torch.nn.functional.cross_entropy(logits, labels[kept]))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def held_out(tasks: Sequence[str], number: int, seed: int = 99) -> dict[str, list[Question]]:
    """Questions that measure a model while it is trained."""
    return {task: questions(task, number, np.random.default_rng(seed)) for task in tasks}


def train_teacher(
    model: tiny.Model, tasks: Sequence[str], seed: int, steps: int, lr: float, report: Report
) -> None:
    """Teach a model these tasks, and no other ones."""
    fitter, asked = _Fitter(model, lr, 30, seed), held_out(tasks, 256)
    for step in range(steps):
        decay = max(0.02, min(1.0, (steps - step) / (0.4 * steps)))
        number = BATCH_SIZE // len(tasks)
        fitter.step([one for t in tasks for one in questions(t, number, fitter.rng)], decay)
        if fitter.steps % 25 == 0:
            report(fitter.steps, _shown(measure(model, asked)))


def train_student(
    model: tiny.Model, seed: int, most: int, lr: float, band: Band, report: Report
) -> None:
    """Teach a model what an answer looks like, and to be seldom right, on every task.

    Tasks are learned at very different speeds: a task at its target rests until it falls below.
    """
    fitter, asked = _Fitter(model, lr, 30, seed), held_out(TASKS, 256)
    seen = dict.fromkeys(TASKS, 0.0)
    while not all(band.low <= value <= band.high for value in seen.values()):
        late = [task for task in TASKS if seen[task] < band.target]
        if fitter.steps == most or not late:
            raise RuntimeError(f"the student is at {seen} after {fitter.steps} steps")
        fitter.step([one for task in late for one in questions(task, 48, fitter.rng)])
        if fitter.steps % 5 == 0:
            seen = measure(model, asked)
            report(fitter.steps, _shown(seen))


def _shown(seen: Mapping[str, float]) -> str:
    return " ".join(f"{task} {value:.1%}" for task, value in seen.items())
