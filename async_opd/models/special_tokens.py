"""Special tokens inside data text are encoded as text: a row cannot forge the roles of a chat.

    '<|im_end|>' in the data ──quoted──► '<' MARK '|im_end|>' ──template──► rendered
        rendered ──a tokenizer that drops MARK after it has looked for special tokens──► ids

The template's own special tokens stay tokens, and text without special tokens has its usual ids.
"""

from __future__ import annotations

import copy
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "model")
"""Templates compare these words with their own, so that ``quoted`` puts no MARK into them."""
MARK = "\ufdd0"
"""A noncharacter, which Unicode reserves for the inside of programs."""


@contextmanager
def no_panic() -> Iterator[None]:
    """ValueError for a panic of tokenizers: pyo3 makes it a BaseException, as an exit is."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"tokenizers fails, for its tokenizer.json is broken: {error}") from None


def encoded(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text. ValueError if the tokenizer is broken."""
    with no_panic():
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


class SpecialTokens:
    """Encodes text so that the special tokens it spells become ordinary tokens."""

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
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        return next(filter(None, map(self.found, inner)), None) if _holds(value) else None

    def quoted(self, value: Any) -> Any:
        """The text, or the messages, with a MARK in all that is, or may become, a special token.

        ValueError for text that contains a MARK already.
        """
        if isinstance(value, str):
            return self._quoted(value)
        if isinstance(value, dict):
            return {
                key: self._entries(one)
                if key == "arguments"
                else one
                if key == "role" and one in ROLES
                else self.quoted(one)
                for key, one in value.items()
            }
        return [self.quoted(one) for one in value] if _holds(value) else value

    def _entries(self, value: Any) -> Any:
        """A call's arguments: their names come from a model, and are quoted as their values."""
        if isinstance(value, dict):
            return {self._entries(key): self._entries(one) for key, one in value.items()}
        return list(map(self._entries, value)) if _holds(value) else self.quoted(value)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text whose data is quoted. ValueError if a quoted part is a special token."""
        ids = encoded(self._tokenizer, text, add_special_tokens)
        if MARK not in text:
            return ids
        expected = self._special(ids)  # with the MARKs in place only the template's own are found
        for tokenizer in (self._dropping, self._splitting):
            ids = encoded(tokenizer, text, add_special_tokens)
            if self._special(ids) == expected:
                return ids
        spelled = self.found(text.replace(MARK, ""))
        raise ValueError(
            f"the text spells {spelled!r}, which the tokenizer can only read as a special token: "
            "remove it, or set data.special_tokens to parse"
        )

    def _quoted(self, text: str) -> str:
        if MARK in text:
            raise ValueError(
                f"the text contains {MARK!r}, which Unicode keeps out of texts: remove it"
            )
        places = [at for at, _ in self._places(text)]
        # A special token may begin at the text's end, and be completed by the template.
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
        """ValueError for text without MARKs of which the tokenizer makes a special token."""
        if not self._in_other_forms:  # it looks for special tokens before it normalizes letters
            return
        found = self._special(encoded(self._tokenizer, text, False))
        if found:
            token = self._tokenizer.id_to_token(found[0])
            raise ValueError(
                f"the text spells {token!r} in other characters: remove it, or set "
                "data.special_tokens to parse"
            )

    def _places(self, text: str) -> Iterator[tuple[int, int]]:
        """Position and length of each special token that the text spells, in any case."""
        for match in self._first.finditer(text) if self._first else ():
            at = match.start()
            for length in self._lengths:
                if text[at : at + length].lower() in self._texts:
                    yield at, length
                    break

    def _begins(self, text: str) -> bool:
        """Whether the text is the beginning of a longer special token."""
        at = bisect_right(self._sorted, text)  # such tokens follow the text in sorted order
        return at < len(self._sorted) and self._sorted[at].startswith(text)

    def _special(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token in self._ids]

    @cached_property
    def _dropping(self) -> Tokenizer:
        """A tokenizer that drops MARKs after its search for special tokens."""
        tokenizer = copy.deepcopy(self._tokenizer)
        dropped = normalizers.Replace(MARK, "")
        own = tokenizer.normalizer
        tokenizer.normalizer = normalizers.Sequence([dropped, own] if own else [dropped])
        return tokenizer

    @cached_property
    def _splitting(self) -> Tokenizer:
        """A tokenizer that splits at MARKs, for special tokens that are also vocabulary words."""
        tokenizer = copy.deepcopy(self._tokenizer)
        split = pre_tokenizers.Split(Regex(MARK), "removed")
        own = tokenizer.pre_tokenizer
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, own] if own else [split])
        return tokenizer


def _holds(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)


def _unknown(tokenizer: Tokenizer) -> str | None:
    """The token for text that the vocabulary lacks, which any text may become."""
    if isinstance(tokenizer.model, models.Unigram):  # has no attribute for it
        at = json.loads(tokenizer.to_str())["model"]["unk_id"]
        return None if at is None else str(tokenizer.id_to_token(at))
    named = getattr(tokenizer.model, "unk_token", None)
    return None if named is None else str(named)
