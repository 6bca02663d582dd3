"""Shared by all tests: the path to the helpers beside them, and seeds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# pytest runs with --import-mode=importlib, so that the repository root (whose kernels/ folder would
# shadow Hugging Face's package) stays off sys.path; the helpers in this folder are plain modules.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
