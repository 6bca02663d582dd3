"""How a question becomes a prompt, and where in a completion its answer stands."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fused_grpo.trainer.rollout import Prompt

TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def first_line(text: str) -> str | None:
    """The first line, blanks around it aside."""
    return text.split("\n")[0].strip() or None


def last_line(text: str) -> str | None:
    """The last line that is not blank."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None


def tagged(text: str) -> str | None:
    """What the last <answer>...</answer> holds."""
    found = TAG.findall(text)
    return found[-1].strip() or None if found else None


def tagged_or_last_line(text: str) -> str | None:
    """What the last <answer>...</answer> holds; without one, the last line."""
    return tagged(text) if TAG.search(text) else last_line(text)


def whole(text: str) -> str | None:
    """All of it, blanks around it aside."""
    return text.strip() or None


# None: there is no answer, which is wrong, and has no vote
ANSWERS: dict[str, Callable[[str], str | None]] = {
    "first-line": first_line,
    "last-line": last_line,
    "tag": tagged,
    "tag-or-last-line": tagged_or_last_line,
    "whole": whole,
}


@dataclass(frozen=True)
class PromptStyle:
    """Questions as conversations for the chat template, or as text to be continued.

    Attributes:
        chat: a list of messages, else a text that ends with "Answer:".
        system: the conversation's system message, or the first paragraph of the text.
    """

    chat: bool
    system: str | None = None

    def __call__(self, question: str, examples: Sequence[tuple[str, str]] = ()) -> Prompt:
        """The prompt of a question after worked examples, each a question and its answer."""
        if self.chat:
            turns = [] if self.system is None else [("system", self.system)]
            for asked, answer in examples:
                turns += [("user", asked), ("assistant", answer)]
            turns.append(("user", question))
            return [{"role": role, "content": content} for role, content in turns]
        parts = [] if self.system is None else [self.system]
        parts += [f"Question: {asked}\nAnswer: {answer}" for asked, answer in examples]
        return "\n\n".join([*parts, f"Question: {question}\nAnswer:"])


def text_of(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion, which for a conversation is a message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
