"""Verifiers: whether one answer is right, asked in processes that may hang, crash or be killed.

A verifier is a function that takes what it asks for by name: `completion`, `prompt`, and columns
of the data set such as `answer`. Nothing that a data set or a model wrote is ever executed here;
`math` hands the text to math-verify's parser.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from fused_grpo.checks import imported_function
from fused_grpo.trainer import judges
from fused_grpo.trainer.isolation import isolated
from fused_grpo.trainer.models import MissingExtraError
from fused_grpo.trainer.prompts import text_of

Verifier = Callable[..., float | None]
TIMEOUT = 10.0  # seconds for one answer: sympy takes milliseconds when it comes back at all
FORMS = "math, exact, regex:PATTERN or module:function"


class VerifierReward:
    """A reward function for `GRPOTrainer` that asks a verifier about each completion.

    A completion without an answer is worth 0. One on which the verifier fails, by raising, hanging
    or ending its process, has the reward None: it is left out, and counted.

    Args:
        name: of the reward in logs.
        verifier: is given the answer as `completion`.
        answer_of: finds the answer in a completion; see `prompts.ANSWERS`.

    Attributes:
        failures: of the last call, by kind, where the verifier runs in processes of its own.
    """

    def __init__(
        self, name: str, verifier: Verifier, answer_of: Callable[[str], str | None]
    ) -> None:
        self.__name__, self.answer_of = name, answer_of
        # a comparison of two texts cannot hang
        self._verify: Any = _each_exact if verifier is judges.exact else isolated(verifier, TIMEOUT)
        self.failures: Counter[str] = Counter()

    def __call__(self, completions: list[Any], **columns: Any) -> list[float | None]:
        answers = [self.answer_of(text_of(completion)) for completion in completions]
        asked = [i for i, answer in enumerate(answers) if answer is not None]
        rewards: list[float | None] = [0.0] * len(answers)
        self.failures = Counter()
        if asked:
            batch = {name: [column[i] for i in asked] for name, column in columns.items()}
            found = self._verify(completions=[answers[i] for i in asked], **batch)
            self.failures = Counter(getattr(self._verify, "failures", {}))
            for i, value in zip(asked, found, strict=True):
                rewards[i] = value
        return rewards


def make_verifier(form: str) -> tuple[str, Verifier]:
    """The name and the function of what `--verifier` says.

    Raises:
        ValueError: an unknown form, a pattern that does not compile, a function that is not there.
        MissingExtraError: "math" without math-verify.
    """
    kind, _, rest = form.partition(":")
    if form == "exact":
        return "exact", judges.exact
    if form == "math":
        need("math_verify", "--verifier math")
        from fused_grpo.trainer import judges_math

        return "math", judges_math.mathematics
    if kind == "regex" and rest:
        try:
            re.compile(rest)
        except re.error as error:
            raise ValueError(f"verifier={form!r}: the pattern does not compile: {error}") from error
        return "regex", functools.partial(judges.regex, rest)
    if rest:
        return rest, imported_function("verifier", form)
    raise ValueError(f"verifier={form!r} is unknown; it is one of {FORMS}")


def need(package: str, what: str) -> None:
    """MissingExtraError unless `package` of the tasks extra is installed."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(
            f"{what} needs {package.replace('_', '-')}, which is not installed here. Install the "
            "tasks extra, `pip install 'fused-grpo[tasks]'`"
        )


def _each_exact(completions: list[str], answer: list[Any], **_: Any) -> list[float | None]:
    return [judges.exact(*pair) for pair in zip(completions, answer, strict=True)]
