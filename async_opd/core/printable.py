"""Escapes foreign text for a terminal or a log: it can neither command nor forge anything.

A server's, a grader's or a model's text may hold escape sequences (which set a terminal's title,
clear it, write its clipboard), characters that reverse the order of letters, and line breaks
after which it looks like a line of the run.
"""

from __future__ import annotations

import re

_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"  # order of letters, lines, invisible
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_UNINDENTED = re.compile(r"\n(?!  )")


def escaped(text: str) -> str:
    r"""Control characters as escapes (``\x1b``), but tab and newline; ``\r\n`` is a newline."""
    text = text.replace("\r\n", "\n")
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def indented(text: str) -> str:
    """``escaped``, and every line but the first is indented by two spaces at least."""
    return _UNINDENTED.sub("\n    ", escaped(text))


def on_one_line(text: str) -> str:
    r"""``escaped`` for a name: newlines and tabs are escapes, too."""
    return escaped(text).replace("\n", r"\n").replace("\t", r"\t")
