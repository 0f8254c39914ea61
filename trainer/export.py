"""The trained student as a Hugging Face directory that transformers and vLLM load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def save_model(model: Any, source: str, directory: str) -> None:
    """Writes weights, config and the source's tokenizer files; complete or not at all.

        write <name>.part ──► move what is there to <name>.old ──► rename ──► remove <name>.old

    At every moment there is a complete model on the disk; an error leaves the one that was there.
    A directory that is already there is replaced. Weights are written in the model's own precision
    (float32 masters).
    """
    target = Path(directory)
    part = target.with_name(target.name + ".part")
    old = target.with_name(target.name + ".old")
    shutil.rmtree(part, ignore_errors=True)
    try:
        model.save_pretrained(part)
        for name in TOKENIZER_FILES:
            if (file := Path(source) / name).is_file():
                shutil.copyfile(file, part / name)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        try:
            part.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
