"""docs/objectives.md says what the tables of the package say."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import formulas
import pytest

from fused_grpo import LossSpec, advantages
from fused_grpo.aggregation import PRESETS, SCHEMES
from fused_grpo.corrections import CORRECTIONS
from fused_grpo.kl import ESTIMATORS
from fused_grpo.objectives import LOSS_TYPES
from fused_grpo.ratios import LEVELS

PAGE = (Path(__file__).parent.parent / "docs" / "objectives.md").read_text()
OBJECTIVES, ADVANTAGES = PAGE.split("## Advantages")
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
    names = {*SCHEMES, *PRESETS, *CORRECTIONS, *ESTIMATORS}
    names |= {f.name for f in fields(LossSpec)}
    assert not {name for name in names if f"`{name}`" not in PAGE}
    assert not {
        name for name in {*advantages.ESTIMATORS, "gdpo"} if f"| `{name}` |" not in ADVANTAGES
    }
    assert not {level for level in LEVELS if f'"{level}"' not in PAGE}


def test_defaults_of_objectives_are_those_of_the_table() -> None:
    for name in formulas.POLICY:
        (row,) = [line for line in ROWS if line.startswith(f"| `{name}` |")]
        options = re.split(r"(?<!\\)\|", row.strip("|"))[2]
        for option, value in LOSS_TYPES[name].defaults.items():
            found = re.search(rf"`{option}`(?:, `\w+`)* ([\d.e-]+)", options)
            assert found, (name, option)
            assert float(found[1]) == value, (name, option)
