"""What the trainer says about ways to distribute that it does not know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fused_grpo.trainer.sharding import check_distribution, check_weights, has_weights

FSDP = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1)))


def trainer(n_gpu: int = 1, deepspeed: bool = False, accelerator: Any = None) -> Any:
    return SimpleNamespace(
        args=SimpleNamespace(n_gpu=n_gpu),
        is_deepspeed_enabled=deepspeed,
        is_fsdp_enabled=accelerator is not None,
        accelerator=accelerator,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_gpu": 2}, r"2 GPUs in one process.*torchrun"),
        ({"deepspeed": True}, r"DeepSpeed.*FSDP2.*integrations"),
        ({"accelerator": FSDP}, r"version 1.*fsdp_config={'version': 2}"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    check_distribution(trainer())
    with pytest.raises(ValueError, match=message):
        check_distribution(trainer(**options))


def test_weights_that_are_with_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's efficient loading: nothing can be computed before FSDP spreads the weights."""
    check_weights(nn.Linear(1, 1))
    assert has_weights()
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert has_weights()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not has_weights()
    with pytest.raises(ValueError, match="with one process until training begins"):
        check_weights(nn.Linear(1, 1))
