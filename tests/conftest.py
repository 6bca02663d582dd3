"""Shared by all tests: the path to the helpers beside them, the seed, the number of threads."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before anything counts the cores, here or in a child
    os.environ.setdefault("OMP_NUM_THREADS", "1")

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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("both_backends"):
        metafunc.parametrize("head_backend", ["chunked", "triton"], indirect=True)


def _runs(item: pytest.Item) -> bool:
    """The kernels take no float64, and interpreted they take their time: a mark may thin them out.

    both_backends(triton_if=...): whether to run with these parameters.
    """
    mark, spec = item.get_closest_marker("both_backends"), getattr(item, "callspec", None)
    if mark is None or spec is None or spec.params["head_backend"] != "triton":
        return True
    wanted = mark.kwargs.get("triton_if", lambda parameters: True)
    return spec.params.get("dtype") != torch.float64 and wanted(spec.params)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    dropped = [item for item in items if not _runs(item)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if _runs(item)]


@pytest.fixture(autouse=True)
def head_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Makes "auto" mean this backend, and float32 the default dtype of cases where it is Triton."""
    name: str = getattr(request, "param", "chunked")
    if name == "chunked":
        yield name
        return
    pytest.importorskip("triton")
    import cases

    from fused_grpo import backends, loss, triton_backend, triton_routed

    passes = []

    def head_pass(*args: Any) -> Any:
        passes.append(True)
        return triton_backend.head_pass(*args)

    def routed_pass(*args: Any) -> Any:
        passes.append(True)
        return triton_routed.routed_pass(*args)

    def choose(asked: str, *_: Any) -> backends.Backend:
        assert asked == "auto"
        return backends.Backend("triton", head_pass, triton_backend.plan_pass, routed_pass)

    monkeypatch.setattr(loss, "choose", choose)
    monkeypatch.setattr(cases, "DEFAULT_DTYPE", torch.float32)
    yield name
    assert passes, "this test never reached the Triton backend"
