"""docs/objectives.md says what the tables of the package say, and its example runs."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import formulas
import pytest
import torch

from fused_grpo import LossSpec
from fused_grpo.advantages import ESTIMATORS as ADVANTAGES
from fused_grpo.aggregation import PRESETS, SCHEMES
from fused_grpo.corrections import CORRECTIONS
from fused_grpo.kl import ESTIMATORS
from fused_grpo.objectives import LOSS_TYPES
from fused_grpo.ratios import LEVELS

PAGE = (Path(__file__).parent.parent / "docs" / "objectives.md").read_text()
OBJECTIVES = PAGE.partition("## Objectives")[2].partition("### On top")[0]
ROWS = [line for line in OBJECTIVES.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("name", formulas.POLICY)
def test_one_line_per_objective(name: str) -> None:
    (row,) = [line for line in ROWS if line.startswith(f"| `{name}` |")]
    cells = re.split(r"(?<!\\)\|", row.strip("|"))
    assert len(cells) == 7
    chosen, (options, scheme, locality) = LOSS_TYPES[name], cells[2:5]
    assert scheme.strip() == chosen.scheme
    wide = chosen.level is not None or chosen.locality == "sequence"
    expected = "batch" if chosen.locality == "batch" else "sequence †" if wide else "token"
    assert locality.strip() == expected
    if not re.search(r"as (grpo|gspo)|epsilons|none", options):
        missing = {o for o in chosen.takes - {"log_ratio_clamp"} if f"`{o}`" not in options}
        assert missing <= {"importance_sampling_level"}


def test_every_name_is_there() -> None:
    names = {*SCHEMES, *PRESETS, *CORRECTIONS, *ESTIMATORS, *ADVANTAGES}
    names |= {f.name for f in fields(LossSpec)}
    assert not {name for name in names if f"`{name}`" not in PAGE}
    assert not {level for level in LEVELS if f'"{level}"' not in PAGE}


def test_defaults_of_objectives_are_those_of_the_table() -> None:
    for name in formulas.POLICY:
        (row,) = [line for line in ROWS if line.startswith(f"| `{name}` |")]
        options = re.split(r"(?<!\\)\|", row.strip("|"))[2]
        for option, value in LOSS_TYPES[name].defaults.items():
            found = re.search(rf"`{option}`(?:, `\w+`)* ([\d.e-]+)", options)
            assert found, (name, option)
            assert float(found[1]) == value, (name, option)


def test_the_example_runs() -> None:
    before = dict(LOSS_TYPES)
    example = PAGE.split("```python")[1].split("```")[0]
    names = {
        "hidden": torch.randn(2, 3, 4, requires_grad=True),
        "weight": torch.randn(9, 4),
        "ids": torch.randint(9, (2, 3)),
        "advantages": torch.tensor([1.0, -1.0]),
    }
    try:
        exec(example, names)
        names["loss"].backward()
    finally:
        LOSS_TYPES.clear()
        LOSS_TYPES.update(before)
    assert names["hidden"].grad.abs().sum() > 0
