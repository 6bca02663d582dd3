"""docs/trainer-loop.md: its code runs, and it names every option of the loop with its default."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from fused_grpo.trainer.loop_args import LoopArguments

TEXT = (Path(__file__).parents[1] / "docs" / "trainer-loop.md").read_text()


def test_code_blocks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "docs/trainer-loop.md", "exec"), {"__name__": "docs"})
    assert capsys.readouterr().out.endswith("[None]\nCounter({'error': 1})\n")


@pytest.mark.parametrize("field", fields(LoopArguments), ids=lambda field: field.name)
def test_options_are_documented_with_their_defaults(field: object) -> None:
    name, default = field.name, field.default  # type: ignore[attr-defined]
    (text,) = re.findall(rf"^\| `{name}` \((.*?)\) \|", TEXT, re.M)
    if default is None or default is False:
        assert text in ("off", "none")
    else:
        assert text.strip('"') == (f"{default:g}" if isinstance(default, (float, int)) else default)
