"""How many of the quickstart's questions a saved model answers."""

from __future__ import annotations

import json
from pathlib import Path

import torch

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
SUBSET = 64
MAX_RESPONSE_TOKENS = 8


def accuracy(model: str, source: str) -> float:
    """The share of greedy responses that are the answer, then the end, then only padding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "models" / "student")
    lines = (QUICKSTART / "data" / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["data_source"] == source][:SUBSET]
    inputs = tokenizer([row["prompt"] for row in rows], padding=True, return_tensors="pt")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    out = loaded.generate(**inputs, max_new_tokens=MAX_RESPONSE_TOKENS, do_sample=False)
    right = 0
    for row, ids in zip(rows, out[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
        answer = [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id]
        right += ids == answer + [tokenizer.pad_token_id] * (len(ids) - len(answer))
    return right / SUBSET
