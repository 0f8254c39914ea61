"""Supervised training of the tiny models, and the episodes that say how good they are."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tiny
import torch
from dialogues import Message, Task, answering, result
from transformers import Qwen3ForCausalLM

IGNORED = -100
BATCH_SIZE = 64
CALL = re.compile(r'<tool_call>\n\{"name": "(\w+)", "arguments": (.*)\}\n</tool_call>', re.DOTALL)
MAX_TURNS, MAX_TURN_TOKENS = 10, 20

Report = Callable[[int, str], None]
"""Called, now and then, with the number of steps done and a text about the progress."""


def tokenizer_of(task: Task) -> Any:
    """A tokenizer in which the description of the tool is a token, and each end of a call."""
    whole = tiny.make_tokenizer(()).apply_chat_template(
        [task.zero], tools=[task.schema], tokenize=False
    )
    described, call = (
        turn.split("\n", 1)[1]
        for turn in whole.replace(tiny.END + "\n", tiny.END).split(tiny.END)[:2]
    )
    return tiny.make_tokenizer((described, *call.split("0"), *task.words))


def ids_of(tokenizer: Any, task: Task, dialogues: Sequence[Sequence[Message]]) -> list[list[int]]:
    """The token ids of dialogues."""
    texts = [
        tokenizer.apply_chat_template(list(one), tools=[task.schema], tokenize=False)
        for one in dialogues
    ]
    found: list[list[int]] = tokenizer(texts)["input_ids"]
    return found


class _Marks:
    """The tokens between which a model's turns are."""

    def __init__(self, tokenizer: Any) -> None:
        self.end = tokenizer.convert_tokens_to_ids(tiny.END)
        self.assistant = tokenizer.convert_tokens_to_ids("assistant\n")
        self.pad = tokenizer.pad_token_id


def batch_of(
    tokenizer: Any, task: Task, number: int, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of random dialogues: [N, T] each; labels are of the model's turns only."""
    made = [task.dialogue(rng) for _ in range(number)]
    shown, right = (ids_of(tokenizer, task, one) for one in zip(*made, strict=True))
    marks = _Marks(tokenizer)
    length = max(map(len, shown))
    inputs = np.full((number, length), marks.pad)
    labels = np.full((number, length), IGNORED)
    for at, (read, best) in enumerate(zip(shown, right, strict=True)):
        assert len(read) == len(best)
        inputs[at, : len(read)] = read
        own = False
        for place, token in enumerate(best):
            if own:
                labels[at, place] = token
            own = token == marks.assistant or (own and token != marks.end)
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def train(
    model: Qwen3ForCausalLM,
    tokenizer: Any,
    task: Task,
    steps: int,
    lr: float,
    seed: int,
    report: Report,
) -> None:
    """Train on fresh random dialogues; the learning rate decays over the last 40 % of the steps."""
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(1, steps + 1):
        decay = max(0.02, (steps - step) / (0.4 * steps))
        optimizer.param_groups[0]["lr"] = lr * min(1.0, step / 20, decay)
        inputs, labels = batch_of(tokenizer, task, BATCH_SIZE, rng)
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps:
            report(step, f"loss {loss.item():.3f}")


@torch.no_grad()
def _turns(model: Qwen3ForCausalLM, tokenizer: Any, begun: list[list[int]]) -> list[str]:
    """The greedy turns that follow these tokens, as texts; of too long ones the beginning."""
    marks = _Marks(tokenizer)
    ids = [list(one) for one in begun]
    left = list(range(len(ids)))
    for _ in range(MAX_TURN_TOKENS):
        longest = max(len(ids[at]) for at in left)
        inputs = torch.tensor([ids[at] + [marks.pad] * (longest - len(ids[at])) for at in left])
        last = torch.tensor([len(ids[at]) - 1 for at in left])
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
        best = model.lm_head(hidden[torch.arange(len(left)), last]).argmax(-1)
        for at, token in zip(left, best.tolist(), strict=True):
            ids[at].append(token)
        left = [at for at in left if ids[at][-1] != marks.end]
        if not left:
            break
    return [
        tokenizer.decode([i for i in after[len(before) :] if i != marks.end])
        for before, after in zip(begun, ids, strict=True)
    ]


def play(
    model: Qwen3ForCausalLM, tokenizer: Any, task: Task, rows: Sequence[Mapping[str, Any]]
) -> list[bool]:
    """Whether the model succeeds, greedily, in an episode of each row."""
    model.eval()
    games = [task.environment() for _ in rows]
    for game, row in zip(games, rows, strict=True):
        game.reset(**{k: v for k, v in row.items() if k in ("number", "guesses")})
    history: list[list[Message]] = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    going = list(range(len(rows)))
    last = [""] * len(rows)
    for _ in range(MAX_TURNS):
        texts = [
            tokenizer.apply_chat_template(
                history[at], tools=[task.schema], tokenize=False, add_generation_prompt=True
            )
            for at in going
        ]
        turns = _turns(model, tokenizer, tokenizer(texts)["input_ids"])
        calling = []
        for at, text in zip(going, turns, strict=True):
            last[at] = text
            found = CALL.search(text)
            if found is None:
                continue
            try:
                name, given = found.groups()
                answer = getattr(games[at], name)(**json.loads(given))
            except (ValueError, TypeError, AttributeError) as error:
                answer = json.dumps({"error": str(error)})
            history[at] += [answering(text), result(answer)]
            calling.append(at)
        going = calling
        if not going:
            break
    return [
        bool(game.get_reward()) if hasattr(game, "get_reward") else text == row["answer"]
        for game, text, row in zip(games, last, rows, strict=True)
    ]
