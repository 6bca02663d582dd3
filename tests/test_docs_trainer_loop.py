"""docs/trainer-loop.md names every option of the loop with its default."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from fused_grpo.trainer.loop_args import LoopArguments

TEXT = (Path(__file__).parents[1] / "docs" / "trainer-loop.md").read_text()


@pytest.mark.parametrize("field", fields(LoopArguments), ids=lambda field: field.name)
def test_options_are_documented_with_their_defaults(field: object) -> None:
    name, default = field.name, field.default  # type: ignore[attr-defined]
    (text,) = re.findall(rf"^\| `{name}` \((.*?)\) \|", TEXT, re.M)
    if default is None or default is False:
        assert text in ("off", "none")
    else:
        assert text.strip('"') == (f"{default:g}" if isinstance(default, (float, int)) else default)
