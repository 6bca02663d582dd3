"""Shared by all tests: the path to the helpers beside them, the seed, the number of threads."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Triton reads this when it is imported: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# pytest runs with --import-mode=importlib, so that the repository root (whose kernels/ folder would
# shadow Hugging Face's package) stays off sys.path; the helpers in this folder are plain modules.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """On small matrices and a busy machine, threads cost several times what they save."""
    before = torch.get_num_threads()
    if "slow" not in request.keywords:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
