"""docs/trainer-monitoring.md says what the rules and the options are."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import watched_runs

from fused_grpo.trainer.health_rules import CALM, FIRST, MARGIN, RULES, USUAL, WORSE, Rule
from fused_grpo.trainer.monitor_args import MonitorArguments
from fused_grpo.trainer.progress import ENDS

PAGE = (Path(__file__).parent.parent / "docs" / "trainer-monitoring.md").read_text()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_table_of_rules(rule: Rule) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{rule.name}` |")]
    sign = ">=" if rule.sign > 0 else "<="
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:] == [
        f"`{rule.metric}`",
        f"{rule.reading} of {rule.over}",
        f"{sign} {rule.threshold:g}",
        rule.advice,
    ]


def test_it_has_no_other_rules() -> None:
    section = PAGE.split("## Warnings")[1]
    rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert rows == [rule.name for rule in RULES]


def test_numbers_in_the_text() -> None:
    text = " ".join(PAGE.split())
    assert f"the mean of the first {FIRST} logs" in text
    assert f"up to {USUAL} logs before the last, of {USUAL // 2} at least" in text
    assert f"stayed {MARGIN:.0%} on".replace("%", " %") in text
    assert f"for {CALM} logs" in text
    assert WORSE == 2, "twice as far (or half)"
    assert ENDS == 5, "means of the first and last five logs"


def test_every_option_is_there() -> None:
    assert not {f.name for f in fields(MonitorArguments) if f"`{f.name}" not in PAGE}


def test_every_metric_of_a_run_is_there(tmp_path: Path) -> None:
    run = watched_runs.make(tmp_path, beta=0.1, max_steps=1)
    run.train()
    run.evaluate()
    names = {name for entry in run.state.log_history for name in entry} - {"step"}
    names = {n for n in names if not n.startswith(("eval_", "train_", "total_flos"))}
    heads = {n.split("/")[0] for n in names}
    assert not {h for h in heads if not re.search(rf"`{h}[/`<]", PAGE)}
    tails = {n.split("/")[-1] for n in names if n.startswith(("completions/", "rewards/", "clip"))}
    assert not {t for t in tails if not re.search(rf"[`/]{t}`", PAGE)}
