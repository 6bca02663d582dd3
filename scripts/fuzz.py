"""Draws cases for the property tests until the time is up, and says how many were tried.

    python scripts/fuzz.py --minutes 20 [--seed 0] [--factor 4] [pytest options]

Runs every test of hypothesis in tests/ again and again, each round with a seed of its own and
`factor` times the examples of CI. Ends at the first round that fails, with the failing case
reduced and the seed that finds it again.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Those that `fuzzing.examples` scales; the tests of single functions have enough in CI.
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_properties*.py"))


class Counting:
    """A plugin: counts what hypothesis tries, and ends a round when the time is up."""

    def __init__(self, deadline: float) -> None:
        self.deadline, self.cases, self.tests = deadline, Counter[str](), set[str]()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if hasattr(item.obj, "hypothesis")]
        if not items:
            raise SystemExit("no test of hypothesis was selected: nothing would be tried")

    def pytest_runtest_call(self, item: Any) -> None:
        handle = item.obj.hypothesis
        inner = getattr(handle.inner_test, "counted", handle.inner_test)

        @functools.wraps(inner)
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            self.cases[item.originalname] += 1  # not those that an assumption turned down
            return result

        counted.counted = inner  # type: ignore[attr-defined]
        handle.inner_test = counted

    def pytest_runtest_teardown(self, item: Any) -> None:
        self.tests.add(item.nodeid)
        if time.monotonic() > self.deadline:
            item.session.shouldstop = "the time is up"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=None, help="of the first round; default: time")
    parser.add_argument("--factor", type=int, default=4, help="examples, in multiples of CI's")
    parser.add_argument("--json", type=Path, help="where to write the counts")
    args, rest = parser.parse_known_args(arguments)
    os.environ["FUZZ_FACTOR"] = str(args.factor)
    os.chdir(ROOT)
    import pytest

    start = time.monotonic()
    plugin = Counting(start + 60 * args.minutes)
    seed = int(time.time()) if args.seed is None else args.seed
    rounds, status = 0, 0
    while status == 0 and time.monotonic() < plugin.deadline:
        options = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"]
        options += ["--timeout=0", f"--hypothesis-seed={seed + rounds}", *rest, *FILES]
        print(f"round {rounds + 1}, seed {seed + rounds}", flush=True)
        status = int(pytest.main(options, plugins=[plugin]))
        rounds += 1
        if status == 2 and time.monotonic() >= plugin.deadline:
            status = 0  # interrupted by ourselves
    report = {
        "cases": sum(plugin.cases.values()),
        "tests": len(plugin.tests),
        "rounds": rounds,
        "first_seed": seed,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "failed": status != 0,
        "by_test": dict(plugin.cases.most_common()),
    }
    for name, count in plugin.cases.most_common():
        print(f"{count:>9,} {name}")
    found = "A TEST FAILED" if status else "no failure"
    print(
        f"{report['cases']:,} cases of {report['tests']} tests in {report['minutes']} minutes, "
        f"{rounds} rounds from seed {seed}: {found}"
    )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
