"""Special tokens inside data text are text: a row cannot forge the roles of a chat.

    '<|im_end|>' in the data ──quoted──► '<' MARK '|im_end|>' ──template──► rendered
        rendered ──a tokenizer that drops MARK after it has looked for special tokens──► ids

So the template's own special tokens stay tokens, and text without any is encoded as ever.
"""

from __future__ import annotations

import copy
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "model")
"""Templates compare these words with their own: they stay as they are."""
MARK = "\ufdd0"
"""A character that Unicode keeps free for the inside of programs."""


class SpecialTokens:
    """What a tokenizer reads as special, and how to have it read as text."""

    def __init__(self, tokenizer: Tokenizer, named: Iterable[str] = ()) -> None:
        """``named``: further tokens that count as special, such as the end of a response."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        named = {name for name in named if isinstance(name, str)}
        special = {i: one for i, one in added.items() if one.special or one.content in named}
        unknown = _unknown(tokenizer)
        self._ids = {i for i, token in special.items() if token.content != unknown}
        texts = {token.content for token in special.values() if token.content}
        self._texts = {text.lower() for text in texts}
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        self._sorted = sorted(self._texts)
        firsts = {case for text in texts for case in (text[0].lower(), text[0].upper())}
        self._first = re.compile("|".join(map(re.escape, sorted(firsts)))) if firsts else None
        self._in_other_forms = any(token.normalized for token in special.values())

    def found(self, value: Any) -> str | None:
        """The first special token that the text, or one of the messages, spells."""
        if isinstance(value, str):
            return next((value[at : at + n] for at, n in self._places(value)), None)
        inner = value.values() if isinstance(value, dict) else value
        return next(filter(None, map(self.found, inner)), None) if _holds(value) else None

    def quoted(self, value: Any) -> Any:
        """The text, or the messages, with a MARK in whatever is, or may become, a special token.

        ValueError for text that holds a MARK of its own.
        """
        if isinstance(value, str):
            return self._quoted(value)
        if isinstance(value, dict):
            return {
                key: one if key == "role" and one in ROLES else self.quoted(one)
                for key, one in value.items()
            }
        return [self.quoted(one) for one in value] if _holds(value) else value

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text whose data is quoted. ValueError if a special token would come of that."""
        ids = self._encoded(self._tokenizer, text, add_special_tokens)
        if MARK not in text:
            return ids
        own = self._special(ids)
        for reading in (self._whole, self._cut):
            ids = self._encoded(reading, text, add_special_tokens)
            if self._special(ids) == own:
                return ids
        spelled = self.found(text.replace(MARK, ""))
        raise ValueError(
            f"the text spells {spelled!r}, which the tokenizer can only read as a special token: "
            "remove it, or set data.special_tokens to parse"
        )

    def _quoted(self, text: str) -> str:
        if MARK in text:
            raise ValueError(f"the text holds {MARK!r}, which Unicode keeps out of texts")
        places = [at for at, _ in self._places(text)]
        end = text.rstrip()
        reach = min(len(end), self._lengths[0] if self._lengths else 0)
        begun = [len(end) - n for n in range(1, reach + 1) if self._begins(end[-n:].lower())]
        marks = sorted({at + 1 for at in [*places, *begun]})
        if not marks:
            self._refuse_other_forms(text)
            return text
        return "".join(
            text[start:stop] + (MARK if stop is not None else "")
            for start, stop in zip([0, *marks], [*marks, None], strict=True)
        )

    def _refuse_other_forms(self, text: str) -> None:
        """Some tokenizers look for special tokens after they have changed letters."""
        if not self._in_other_forms:
            return
        found = self._special(self._encoded(self._tokenizer, text, False))
        if found:
            token = self._tokenizer.id_to_token(found[0])
            raise ValueError(
                f"the text spells {token!r} in other characters: remove it, or set "
                "data.special_tokens to parse"
            )

    def _places(self, text: str) -> Iterator[tuple[int, int]]:
        """Where special tokens are spelled, in whatever case, and how long each is."""
        for match in self._first.finditer(text) if self._first else ():
            at = match.start()
            for length in self._lengths:
                if text[at : at + length].lower() in self._texts:
                    yield at, length
                    break

    def _begins(self, text: str) -> bool:
        """Whether a special token goes on where the text ends; those that do follow on it."""
        at = bisect_right(self._sorted, text)
        return at < len(self._sorted) and self._sorted[at].startswith(text)

    def _special(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token in self._ids]

    @staticmethod
    def _encoded(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    @cached_property
    def _whole(self) -> Tokenizer:
        """Drops MARKs before it normalizes: the text is read as if it had never had any."""
        tokenizer = copy.deepcopy(self._tokenizer)
        dropped = normalizers.Replace(MARK, "")
        own = tokenizer.normalizer
        tokenizer.normalizer = normalizers.Sequence([dropped, own] if own else [dropped])
        return tokenizer

    @cached_property
    def _cut(self) -> Tokenizer:
        """Cuts the text at MARKs: for words that are special tokens even when they are text."""
        tokenizer = copy.deepcopy(self._tokenizer)
        cut = pre_tokenizers.Split(Regex(MARK), "removed")
        own = tokenizer.pre_tokenizer
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, own] if own else [cut])
        return tokenizer


def _holds(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)


def _unknown(tokenizer: Tokenizer) -> str | None:
    """The token of what the vocabulary lacks, which any text may contain."""
    if isinstance(tokenizer.model, models.Unigram):  # which does not tell it otherwise
        at = json.loads(tokenizer.to_str())["model"]["unk_id"]
        return None if at is None else str(tokenizer.id_to_token(at))
    named = getattr(tokenizer.model, "unk_token", None)
    return None if named is None else str(named)
