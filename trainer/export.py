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

    A directory that is already there is replaced.
    """
    target = Path(directory)
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    for name in TOKENIZER_FILES:
        if (file := Path(source) / name).is_file():
            shutil.copyfile(file, part / name)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
