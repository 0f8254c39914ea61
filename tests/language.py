"""Forms of English that the project does not use, each with plain ones in its place.

    text ──FORMS──► Finding: line, form, plain

The readers are engineers whose first language may not be English: subjects are things in the code,
one verb stands for one idea, and there are no metaphors of people for programs. A form may go over
the end of a line, in a comment and in strings that Python joins too. In names words end at
underscores: ``was_told`` has ``told``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

FORMS = {
    r"(?<!there )(?:is|are|was|were) no(?! longer| more than| less than)": "is not a …",
    r"(?:that|which) sees?|sees": "reads, receives, finds; of a model: a vision model, a VLM",
    r"(?:un)?told|(?<!\.)tells?|telling": "is logged, sent, reported; tell apart: distinguish",
    r"heard?|hears|hearing": "receives, a listener; of a model: audio",
    r"said": "reported, logged, written",
    r"(?:has|have|had) to say": "logs, reports",
    r"speaks?|spoken|spoke|speaking": "reports, names",
    r"fates?": "an outcome, a status",
    r"of (?:its|their|his) own": "a separate …, dedicated GPUs, or nothing",
    r"(?:on|in) (?:its|their) own(?= ways?| process| thread| words|[,;:.])": "alone, separate",
    r"in vain": "without success",
    r"nobody": "no process, no caller, without an owner",
    r"learns? of": "reads, receives",
    r"last[ _]words": "the last error line",
    r"lets? go": "is released",
    r"(?:dealt|deals?)(?: \w+)? out": "is assigned",
    r"(?<!people )(?<!users )(?<!user )(?<!anybody )who(?:ever)?": "the caller, process or user",
    r"alone_of|leave_\w+_alone|of_the_compiler|seen_by_\w+|shown_to_\w+": "a name with a verb",
    r"(?:seen|shown)prompt": "TeacherPrompt, RenderedPrompt",
}
SENTENCE = re.compile(r'(?<!#\s)(?<!\(")\b(?:What|Who)(?:ever)?\b(?![^.]*\?)')
"""A relative clause as the subject of a sentence; titles of Markdown and questions may have one."""
PLAIN = {
    re.compile(rf"(?<![a-z])(?:{form})(?![a-z])".replace(" ", r"\s"), re.IGNORECASE): plain
    for form, plain in FORMS.items()
} | {SENTENCE: "name the subject"}
JOINED = re.compile(r'[ \t]*(?:"[ \t]*\n[ \t]*[rf]*"|\n[ \t]*# |\n[ \t]*)')
"""Between two lines of strings that Python joins, of a comment, of a docstring."""


class Finding(NamedTuple):
    """A form that is not plain, in ``line`` (from 1) of a text, and ``plain`` ones for it."""

    line: int
    form: str
    plain: str


def findings(text: str) -> Iterator[Finding]:
    """All forms of a text that are not plain."""
    flat = JOINED.sub("\n", text)
    for pattern, plain in PLAIN.items():
        for match in pattern.finditer(flat):
            line = flat.count("\n", 0, match.start()) + 1
            yield Finding(line, " ".join(match[0].split()), plain)
