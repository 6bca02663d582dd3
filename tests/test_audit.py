"""`make audit` against stand-ins for pip-audit: nothing known, something known, nobody to ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CLEAN = {"name": "torch", "version": "2.13.0", "vulns": []}
BAD = {
    **{"name": "jinja2", "version": "3.0.0"},
    "vulns": [
        {"id": "CVE-2026-1", "fix_versions": ["3.1.6"]},
        {"id": "PYSEC-2", "fix_versions": []},
    ],
}
UNKNOWN = {"name": "private", "skip_reason": "Dependency not found on PyPI"}


def run(
    folder: Path, program: str | None, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The audit, with a module in the place of pip-audit, or with none to be installed."""
    packages, stamp = folder / "packages", folder / ".audit-1"
    packages.mkdir(exist_ok=True)
    if program is not None:
        (packages / "pip_audit.py").write_text(program)
        stamp.touch()
    command = [sys.executable, str(ROOT / "scripts" / "audit.py"), *arguments]
    command += ["--packages", str(packages), "--stamp", str(stamp)]
    known = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=known)


def answering(*entries: dict, status: int = 0) -> str:
    text = json.dumps({"dependencies": entries, "fixes": []})
    return f"import sys\nprint({text!r})\nsys.exit({status})\n"


def test_nothing_known_passes(tmp_path):
    done = run(tmp_path, answering(CLEAN, UNKNOWN))
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 packages, 0 with known vulnerabilities" in done.stdout
    assert "1 packages could not be looked up: private" in done.stdout


def test_a_known_vulnerability_fails(tmp_path):
    done = run(tmp_path, answering(CLEAN, BAD, UNKNOWN, status=1))
    assert done.returncode == 1
    assert "jinja2 3.0.0: CVE-2026-1, fixed in 3.1.6\n" in done.stdout
    assert "jinja2 3.0.0: PYSEC-2, fixed in no version yet\n" in done.stdout
    assert "2 packages, 1 with known vulnerabilities" in done.stdout


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit('requests.exceptions.ConnectionError: Max retries exceeded')",
        "raise SystemExit('ReadTimeout: HTTPSConnectionPool: Read timed out.')",
        answering(UNKNOWN, UNKNOWN),  # an index that has no such pages, and says that all is well
    ],
)
def test_a_service_that_cannot_be_reached_is_said_and_passes(tmp_path, program):
    done = run(tmp_path, program)
    assert (done.returncode, done.stderr) == (0, "")
    assert "audit: SKIPPED, nothing was looked up: " in done.stdout
    assert "known vulnerabilities" not in done.stdout


def test_a_service_that_hangs_is_not_waited_for(tmp_path):
    start = time.monotonic()
    done = run(tmp_path, "import time\ntime.sleep(90)\n", "--seconds", "1.5")
    assert time.monotonic() - start < 30
    assert done.returncode == 0
    assert "SKIPPED, nothing was looked up: no answer in the time" in done.stdout


def test_a_package_that_cannot_be_installed_is_said_and_passes(tmp_path):
    done = run(
        tmp_path, None, PIP_INDEX_URL=(tmp_path / "none").as_uri(), PIP_CONFIG_FILE=os.devnull
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "SKIPPED, nothing was looked up: pip-audit cannot be installed: ERROR" in done.stdout
    assert not (tmp_path / ".audit-1").exists()


@pytest.mark.parametrize("program", ["raise SystemExit('invalid requirement')", "print('{}')"])
def test_an_audit_that_is_broken_is_no_pass(tmp_path, program):
    done = run(tmp_path, program)
    assert done.returncode == 2
    assert "pip-audit failed" in done.stderr


def test_all_locks_are_looked_up(tmp_path):
    program = (
        "import json, sys\n"
        "json.dump({'dependencies': [{'name': ' '.join(sys.argv), 'version': '1', 'vulns': [{'id': "
        "'x'}]}]}, sys.stdout)\n"
    )
    done = run(tmp_path, program)
    locks = sorted(path.name for path in ROOT.glob("requirements-*.lock"))
    assert len(locks) == 5
    for name in locks:
        assert f"--requirement {ROOT / name}" in done.stdout
    assert "--no-deps" in done.stdout  # or it would ask for more than what is locked


def test_make_and_ci_run_it():
    plain = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "VENV"}
    command = ["make", "-n", "audit"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=plain)
    assert "scripts/audit.py --packages .venv/audit --stamp .venv/.audit-" in done.stdout
    assert "make audit\n" in (ROOT / ".ci" / "run").read_text()
