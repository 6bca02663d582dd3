"""What a run must not tell: passwords and tokens stay out of its files, its logs and trackers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

HIDDEN = "<hidden>"
# of keys and options: hub_token, HF_TOKEN, api-key, password; not max_tokens or eos_token
_SECRET = re.compile(
    r"^-*(.*[-_.])?((hub|hf|auth|access|api|bearer|use_auth|push_to_hub|secret)[-_]?token|token|"
    r"secret|pass(word|wd|phrase)|api[-_]?key|access[-_]?key|secret[-_]?key|credentials?|"
    r"authorization)$",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(r"(eos|bos|pad|unk|sep|cls|mask|stop|image)[-_]token$", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def is_secret(name: Any) -> bool:
    """Whether a key or an option of this name holds a secret."""
    text = str(name)
    return bool(_SECRET.match(text)) and not _NO_SECRET.search(text)


def without_secrets(value: Any, instead: str | None = HIDDEN) -> Any:
    """The same value with `instead` in the place of secrets, in dicts and lists of any depth."""
    if isinstance(value, Mapping):
        return {
            k: instead
            if is_secret(k) and v not in (None, "", True, False)
            else without_secrets(v, instead)
            for k, v in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(without_secrets(v, instead) for v in value)
    return _USERINFO.sub(HIDDEN, value) if isinstance(value, str) else value


def command_without_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command, with the values of options that are secrets hidden."""
    shown: list[str] = []
    hide_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        if hide_next and not word.startswith("--"):
            shown.append(HIDDEN)
        elif equals and is_secret(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(_USERINFO.sub(HIDDEN, word))
        hide_next = word.startswith("-") and not equals and is_secret(name)
    return shown


def check_url(name: str, url: str) -> None:
    """ValueError unless a URL is of http or https, with a host, and nothing secret in it."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
        secret = "@" in parts.netloc
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{name} is no URL: {error}") from None
    if secret:
        raise ValueError(
            f"{name} holds a user name or a password, which errors and logs would show: leave it "
            "out, and reach the server without"
        )
    if not known or parts.query or parts.fragment or any(c <= " " or c == "\x7f" for c in url):
        raise ValueError(f"{name}={url!r} must be like http://host:8000, of http or https")


def printable(text: str) -> str:
    """Text as a terminal may show it: what would move its cursor or change its colours is written
    out."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
