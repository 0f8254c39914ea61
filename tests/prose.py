"""A language model of real prose and its damaged student, made where they are needed.

    long strings of torch's source ──every tenth──► held text ──► nats a token
           └──the others──► teacher (Gemma 3) ──without half of its layers──► student
                     └──beginnings──► prompts

The text is that of the installed torch, whose version the lock fixes, and is copied nowhere else.
The tokenizer has the 32,768 tokens of one that comes with mistral_common.
"""

from __future__ import annotations

import ast
import copy
import json
import math
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

SOURCES = ("_torch_docs.py", "_tensor_docs.py", "functional.py", "nn", "optim", "distributions")
"""Files and folders of torch whose strings are the text."""
LEAST_CHARACTERS = 300
HELD_OUT_EVERY = 10
VOCABULARY = "mistral_instruct_tokenizer_240323.model.v3"
WINDOW = 96
"""Tokens of a sequence, in training and in the measurement."""
BATCH, LR = 12, 3e-3
PROMPT_WORDS, PROMPTS = 16, 3000
EOS = 2


@dataclass(frozen=True)
class Size:
    """Of a teacher: its layers are ``hidden`` wide, and it is trained for ``steps``.

    A step computes logits of its batch's tokens and of so many ``negatives``, which stand for all:
    the head of the whole vocabulary would take most of the time. The student has all layers but
    ``removed``.
    """

    hidden: int
    layers: int
    removed: tuple[int, ...]
    steps: int
    negatives: int


LARGE = Size(hidden=256, layers=8, removed=(1, 2, 3, 4), steps=450, negatives=4096)
"""15 million parameters, eight million of them in the embedding; 0.7 s of a core a step."""
SMALL = Size(hidden=128, layers=6, removed=(1, 2, 3), steps=130, negatives=2048)
"""5 million parameters, four million of them in the embedding; 0.25 s of a core a step."""


@cache
def texts() -> tuple[str, ...]:
    """The strings of at least ``LEAST_CHARACTERS``, each once, in the order of their files."""
    root = Path(torch.__file__).parent
    found: dict[str, None] = {}
    for path in (root / name for name in SOURCES):
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    text = " ".join(node.value.split())
                    if len(text) >= LEAST_CHARACTERS:
                        found[text] = None
    return tuple(found)


def held_texts() -> list[str]:
    """Texts that are neither trained on nor prompts."""
    return list(texts()[::HELD_OUT_EVERY])


def read_texts() -> list[str]:
    """Texts that the teacher is trained on, and that prompts begin."""
    return [text for at, text in enumerate(texts()) if at % HELD_OUT_EVERY]


def make_models(folder: Path, size: Size) -> None:
    """Writes ``teacher``, ``student`` and ``prompts.jsonl``."""
    tokenizer = _tokenizer(folder / "tokenizer")
    teacher = _new_teacher(size)
    _train(teacher, windows(tokenizer, read_texts()), size.steps, size.negatives)
    student = without_layers(teacher, size.removed)
    for name, model in (("teacher", teacher), ("student", student)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    words = [text.split() for text in read_texts()]
    prompts = [
        " ".join(one[start : start + PROMPT_WORDS])
        for start in range(0, 4 * PROMPT_WORDS, PROMPT_WORDS)
        for one in words
        if len(one) >= start + PROMPT_WORDS
    ][:PROMPTS]
    rows = [json.dumps({"prompt": prompt, "data_source": "prose"}) for prompt in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")


@torch.no_grad()
def nats(folder: Path, every: int = 1, batch: int = 10) -> float:
    """A saved model's mean negative log-likelihood of a token of the held texts, in nats.

    A token is predicted from those before it in its window. ``every``: 8 takes an eighth of the
    texts, which costs 2 s of a core for a ``SMALL`` teacher.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    data = windows(AutoTokenizer.from_pretrained(folder), held_texts()[::every])
    total = 0.0
    for rows in data.split(batch):
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
        of_rows = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"
        )
        total += float(of_rows)
    return total / (len(data) * (WINDOW - 1))


def windows(tokenizer: Any, some: list[str]) -> torch.Tensor:
    """Token ids [n, WINDOW] of texts, one after the other; the last one's rest is left out."""
    ids = torch.tensor([one for text in some for one in [*tokenizer.encode(text), EOS]])
    return ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)


def without_layers(model: Any, removed: tuple[int, ...]) -> Any:
    """A copy of a model without these layers."""
    made = copy.deepcopy(model)
    kept = [at for at in range(model.config.num_hidden_layers) if at not in removed]
    made.model.layers = torch.nn.ModuleList(made.model.layers[at] for at in kept)
    made.config.layer_types = [model.config.layer_types[at] for at in kept]
    made.config.num_hidden_layers = len(kept)
    return made


def _tokenizer(folder: Path) -> Any:
    import mistral_common
    from transformers import LlamaTokenizer

    folder.mkdir(parents=True)
    source = Path(mistral_common.__file__).parent / "data" / VOCABULARY
    shutil.copyfile(source, folder / "tokenizer.model")
    return LlamaTokenizer.from_pretrained(folder)


def _new_teacher(size: Size) -> Any:
    """An untrained model."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=32768,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=1,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=512,
        sliding_window=64,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    return Gemma3ForCausalLM(config)


def _train(model: Any, data: torch.Tensor, steps: int, negatives: int) -> None:
    """Teaches the next token: AdamW, 20 steps of warm-up, then a linear decay to 0."""
    generator = torch.Generator().manual_seed(0)
    epochs = -(-steps * BATCH // len(data))
    order = torch.cat([torch.randperm(len(data), generator=generator) for _ in range(epochs)])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    embedding = model.get_input_embeddings().weight
    for step, rows in enumerate(data[order].split(BATCH)[:steps]):
        own, targets = rows[:, 1:].unique(return_inverse=True)
        others = torch.randperm(len(embedding), generator=generator)[:negatives]
        others = others[~torch.isin(others, own)]
        chosen = torch.cat([own, others])
        weight = math.log((len(embedding) - len(own)) / len(others))
        states = model.model(input_ids=rows, use_cache=False).last_hidden_state[:, :-1]
        logits = states.flatten(0, 1) @ embedding[chosen].T
        logits = logits + weight * (torch.arange(len(chosen)) >= len(own))
        torch.nn.functional.cross_entropy(logits, targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = LR * min((step + 1) / 20, 1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
