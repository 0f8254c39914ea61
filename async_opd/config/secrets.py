"""Secrets are found in configs and texts by their names and shapes, refused and redacted.

A config names an environment variable (``api_key_env: NAME``). A secret in the config itself is
refused before any other check. All output for people (the console, run.log, summary.json, dead
letters, error messages) is redacted, because errors of libraries may quote their arguments.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

HIDDEN = "<hidden>"
MIN_CHARACTERS = 8
"""Shorter values of environment variables are not redacted: they occur in ordinary text."""

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_NAME = re.compile(
    r"(^|[_.-])((api|access|auth|client|private|secret|session|refresh|license|hf|gh|bot)?[_-]?"
    r"(key|token|secret)|api_?keys|secrets|passphrase|credentials?|authorization"
    r"|bearer|cookie|auth|pat|sas)$"
    r"|passw|(?<!^old)(?<=.)pwd$|^pass$"
    r"|sql_?pass$|(^|[_.-])(db|pg|mongo|redis|ldap|user|admin|root|smtp|mail|ftp|ssh|https?|proxy)_?pass$"
    r"|(dsn|webhook|webhook_?ur[il]|conn(ection)?_?str(ing)?)$"
)
_SIGNATURE = re.compile(r"(^|[_.-])(sig|signature)$")
"""Names in the query of a URL whose holder may read the file."""
_SPECIAL_TOKEN = re.compile(r"(^|_)(bos|eos|unk|sep|pad|cls|mask|image|audio|video)_token$")
_DIGEST = re.compile(r"(^|[_.-])(revision|commit|sha|hash|digest|checksum|fingerprint)$")
"""Names of hexadecimal values that look like a key of wandb but are none."""
_HEX = r"(?<![\w/@.-])[0-9a-f]{40}(?![\w/.-])"  # wandb's; in paths it is a commit
_SHAPES = (
    r"\bsk-[\w-]{16,}",  # OpenAI, Anthropic and others
    r"\b[sr]k_(?:live|test)_[A-Za-z0-9]{16,}",
    r"\bhf_[A-Za-z0-9]{20,}",
    r"\bgh[oprsu]_[A-Za-z0-9]{20,}",
    r"\bgithub_pat_\w{20,}",
    r"\bgl(?:pat|ptt|dt|rt|ft|soat|cbt|imt|agent)-[\w-]{20,}",  # GitLab
    r"\bgsk_[A-Za-z0-9]{20,}",
    r"\bnvapi-[\w-]{20,}",
    r"\bxai-[A-Za-z0-9]{20,}",
    r"\bwandb_v\d+_\w{20,}",
    r"\bpplx-[A-Za-z0-9]{20,}",
    r"\b(?:npm|r8)_[A-Za-z0-9]{20,}",
    r"\bpypi-[\w-]{40,}",
    r"\bA[KS]IA[A-Z0-9]{16}\b",  # AWS, temporary ones included
    r"\b(?:IQoJ|FwoG|FQoG)[A-Za-z0-9+/=]{40,}",  # session tokens of AWS
    r"\bAIza[\w-]{30,}",
    r"\bdapi[0-9a-f]{32}",  # Databricks
    r"\bSG\.[\w-]{16,}\.[\w-]{16,}",  # SendGrid
    r"\bdckr_[po]at_[\w-]{20,}",
    r"\btgp_v\d+_[\w-]{20,}",  # Together
    r"\blsv2_[a-z]{2}_\w{20,}",  # LangSmith
    r"(?<!\d)\d{6,12}:AA[\w-]{30,}",  # bots of Telegram
    r"\bhooks\.slack\.com/\w+/[\w/-]{16,}",
    r"\bdiscord(?:app)?\.com/api/webhooks/\d+/[\w-]{16,}",
    r"\b(?:AccountKey|SharedAccessKey|SharedAccessSignature)=[^\s;'\"]{8,}",
    r"(?<=;)(?i:password|pwd)=[^\s;'\"]+",  # of a connection string
    r"\bya29\.[\w-]{20,}",
    r"\bxox[abeprs]-[\w-]{10,}",
    r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",  # JSON web tokens
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----",
    r"\bBearer\s+[\w.~+/=-]{8,}",
    r"(?<=://)[^/\s@?#]+(?=@)",  # user, or user:password, of a URL
    _HEX,
)
_VALUE = re.compile("|".join(_SHAPES))
_QUERY = re.compile(r"(?<=[?&])([\w.~-]+)=([^&#\s'\"]+)")


def names_secret(name: str) -> bool:
    """Whether a key or an environment variable of this name, ``apiKey`` too, holds a secret."""
    plain = _HUMP.sub("_", name).lower()
    return bool(_NAME.search(plain)) and not _SPECIAL_TOKEN.search(plain)


def looks_secret(value: str) -> bool:
    """Whether the value contains a key of a well-known kind, or one in a URL's query."""
    return bool(_VALUE.search(value)) or any(
        _in_query(name) and found != HIDDEN for name, found in _QUERY.findall(value)
    )


def _in_query(name: str) -> bool:
    return names_secret(name) or bool(_SIGNATURE.search(name.lower()))


def looks_like_a_variable(name: str) -> bool:
    """Whether the name can be shown: it consists of words in capitals, and is not a key itself."""
    words = name.split("_")
    shape = all(re.fullmatch(r"[A-Z][A-Z0-9]{0,15}|[0-9]{1,4}", word) for word in words)
    return shape and not looks_secret(name)


def without_secret_variables(
    environ: Mapping[str, str], hidden: Iterable[str] = (), given: Iterable[str] = ()
) -> dict[str, str]:
    """The variables in ``given``, and all others that are neither secret nor in ``hidden``."""
    hidden, given = set(hidden), set(given)
    return {
        name: value
        for name, value in environ.items()
        if name in given or not (name in hidden or names_secret(name) or looks_secret(value))
    }


def take_out(tree: Any, key: str = "") -> Iterator[str]:
    """Yields dotted keys of secrets in a tree of YAML values; puts ``<hidden>`` in their place.

    No later message about the same value can show the secret then.
    """
    if not isinstance(tree, dict | list):
        return
    entries = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    for name, value in entries:
        inner = f"{key}.{name}".lstrip(".")
        within = key if isinstance(tree, list) else str(name)
        if _is_secret(within, value) or (key == "cluster.env" and names_secret(str(name))):
            tree[name] = HIDDEN
            yield inner
        elif isinstance(tree, dict) and isinstance(name, str) and looks_secret(name):
            tree[HIDDEN] = tree.pop(name)
            yield f"{key}.{HIDDEN}".lstrip(".")
        else:
            yield from take_out(value, inner)


def _is_secret(name: str, value: Any) -> bool:
    if isinstance(value, str):
        if value in ("", HIDDEN) or (_DIGEST.search(name) and re.fullmatch(_HEX, value)):
            return False
        return names_secret(name) or looks_secret(value)
    is_short = name.lower().endswith(("token", "key")) and len(str(value)) < MIN_CHARACTERS
    return type(value) is int and not is_short and names_secret(name)  # max_token: 8 may be shown


def without_secrets(value: Any, key: str = "") -> Any:
    """A copy with ``<hidden>`` in place of the values of keys as ``hf_token`` or ``api_key``."""
    if isinstance(value, Mapping):
        return {name: without_secrets(entry, str(name)) for name, entry in value.items()}
    if isinstance(value, list):
        return [without_secrets(entry, key) for entry in value]
    return HIDDEN if _is_secret(key, value) else value


class Redactor:
    """Replaces secrets in text: values of secret environment variables, and texts like keys.

    A variable is secret by its name, or because a config names it under ``*_env``.
    """

    def __init__(self, config: Any = None) -> None:
        self._names = set(named_variables(config))

    def __call__(self, text: str) -> str:
        """The text without secrets. The environment is read at each call: it may have changed."""
        for value in sorted(self._values(), key=len, reverse=True):
            text = text.replace(value, HIDDEN)
        return _QUERY.sub(
            lambda match: f"{match[1]}={HIDDEN}" if _in_query(match[1]) else match[0],
            _VALUE.sub(HIDDEN, text),
        )

    def quotes(self, text: str) -> bool:
        """Whether the text has the value of a secret variable."""
        return any(value in text for value in self._values())

    def _values(self) -> set[str]:
        return {
            value
            for name, value in os.environ.items()
            if len(value) >= MIN_CHARACTERS and (name in self._names or names_secret(name))
        }


def named_variables(config: Any) -> Iterator[str]:
    """Yields the names of environment variables under ``*_env`` keys of a tree."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            if str(name).endswith("_env") and isinstance(value, str):
                yield value
            yield from named_variables(value)
    elif isinstance(config, list):
        for value in config:
            yield from named_variables(value)
