"""The comparison on real tokens alone, one part of `benchmarks.report`."""

from __future__ import annotations

import sys

from benchmarks import report

if __name__ == "__main__":
    report.main(["--only", "loss", *sys.argv[1:]])
