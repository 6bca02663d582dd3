"""What runs in a verifier's process, which starts the sooner the less is imported here."""

from __future__ import annotations

import re
from typing import Any


def exact(completion: str, answer: Any) -> float:
    """1 where the two are the same text, blanks around both aside."""
    return float(completion.strip() == str(answer).strip())


def regex(pattern: str, completion: str, answer: Any = None) -> float:
    """1 where the pattern is found, and its first group, if it has any, is the answer."""
    found = re.search(pattern, completion)
    if found is None:
        return 0.0
    return 1.0 if found.re.groups == 0 else exact(found.group(1) or "", answer)
