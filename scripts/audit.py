"""Look up the locked packages among known vulnerabilities, by pip-audit: what `make audit` runs.

Exit status 0: none is known, or nobody could be asked, which it says; 1: at least one is known;
2: the audit itself is broken. It ends in time, so that CI never waits for a service.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
AUDITOR = ROOT / "requirements-audit.lock"
# how pip-audit and what it is built on say that nobody answers
UNREACHABLE = (
    *("ConnectionError", "Connection refused", "Connection aborted", "Max retries exceeded"),
    *("ConnectTimeout", "ReadTimeout", "timed out", "Could not connect", "ServiceError"),
    *("Temporary failure in name resolution", "ProxyError", "SSLError", "Service Unavailable"),
)


class SkippedError(Exception):
    """Nobody could be asked; says why."""


def install(packages: Path, stamp: Path, seconds: float) -> None:
    """pip-audit, as locked, into a folder of its own, unless the stamp says that it is there."""
    if stamp.exists():
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--timeout", "10", "--retries", "1", "--no-deps", "--upgrade"]
    done = _run([*command, "--target", str(packages), "-r", str(AUDITOR)], seconds, {})
    if done.returncode:
        raise SkippedError(f"pip-audit cannot be installed: {_last_line(done.stderr)}")
    for old in stamp.parent.glob(f"{stamp.name.split('-')[0]}-*"):
        old.unlink()
    stamp.touch()


def audit(packages: Path, locks: Sequence[Path], seconds: float) -> list[dict[str, Any]]:
    """What pip-audit says of each package. RuntimeError: it says nothing that can be read."""
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off"]
    command += ["--no-deps", "--disable-pip", "--timeout", "10"]
    for lock in locks:
        command += ["--requirement", str(lock)]
    done = _run(command, seconds, {"PYTHONPATH": str(packages)})
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError) as error:
        if any(words in done.stderr for words in UNREACHABLE):
            raise SkippedError(f"the service does not answer: {_last_line(done.stderr)}") from error
        raise RuntimeError(
            f"pip-audit failed ({done.returncode}): {done.stderr[-2000:]}"
        ) from error
    return found


def report(found: list[dict[str, Any]]) -> int:
    """Prints what is known; the exit status."""
    known = [entry for entry in found if "vulns" in entry]
    if not known:
        raise SkippedError(f"the service knows none of the {len(found)} packages")
    bad = {(e["name"], e["version"]): e["vulns"] for e in known if e["vulns"]}
    for (name, version), vulnerabilities in sorted(bad.items()):
        for one in vulnerabilities:
            fixed = ", ".join(one.get("fix_versions") or ()) or "no version yet"
            print(f"{name} {version}: {one['id']}, fixed in {fixed}")
    unknown = sorted(entry["name"] for entry in found if "vulns" not in entry)
    if unknown:
        print(f"audit: {len(unknown)} packages could not be looked up: {', '.join(unknown)}")
    print(f"audit: {len(known)} packages, {len(bad)} with known vulnerabilities")
    return 1 if bad else 0


def _run(
    command: list[str], seconds: float, more: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **more}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=max(seconds, 0.1), env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise SkippedError(f"no answer in the time of {error.timeout:.0f} s") from error


def _last_line(text: str) -> str:
    return next(iter(reversed(text.strip().splitlines())), "no reason given")[:300]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("locks", nargs="*", type=Path, help="default: all of the repository")
    parser.add_argument("--packages", type=Path, required=True, help="where pip-audit is or goes")
    parser.add_argument("--stamp", type=Path, required=True, help="there once it is installed")
    parser.add_argument("--seconds", type=float, default=60.0, help="for everything together")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    locks = options.locks or sorted(ROOT.glob("requirements-*.lock"))
    try:
        install(options.packages, options.stamp, end - time.monotonic())
        return report(audit(options.packages, locks, end - time.monotonic()))
    except SkippedError as reason:
        print(f"audit: SKIPPED, nothing was looked up: {reason}")
        return 0
    except RuntimeError as error:
        print(f"audit: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
