"""The faults that tests put into a run, in one table.

test_trainer_faults.py runs every row, and `python tests/faults.py` writes docs/faults.md from it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fault_arena import Fault
from faults_data import DATA_FAULTS
from faults_disk import DISK_FAULTS
from faults_rewards import REWARD_FAULTS
from faults_servers import SERVER_FAULTS

DOCUMENT = Path(__file__).parents[1] / "docs" / "faults.md"
TABLE: list[Fault] = [*REWARD_FAULTS, *SERVER_FAULTS, *DATA_FAULTS, *DISK_FAULTS]


def document() -> str:
    """docs/faults.md."""
    lines = [HEAD.format(count=len(TABLE))]
    for group in dict.fromkeys(fault.group for fault in TABLE):
        lines += [f"## {group}", "", "| what happens | what you read | and then |", "|---|---|---|"]
        for fault in (fault for fault in TABLE if fault.group == group):
            cells = (fault.what, f"`{fault.message}`" if fault.message else "", fault.ends)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


HEAD = """\
# Faults in a run, and what becomes of it

{count} faults that tests put into a run of the trainer, one at a time, each after two steps that
were saved. `python tests/faults.py` writes this page from the table of the tests.
"""


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}", file=sys.stderr)
