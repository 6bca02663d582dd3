"""The policy's weights as another engine reads them: whole, and with adapters merged in."""

from __future__ import annotations

import copy
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fused_grpo.distributed import full_weight
from fused_grpo.integrations.models import causal_lm


@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the model without its adapter, what that has learnt being merged in.

    Adapters are merged a layer at a time and on a copy: merging and unmerging in place would leave
    a rounding error in the weights each time. Sharded weights are gathered: all ranks must iterate.
    """
    inner = causal_lm(model)
    adapted: dict[str, Any] = {}
    for name, module in inner.named_modules():
        if _is_adapter(module) and not name.startswith(tuple(f"{n}." for n in adapted)):
            adapted[name] = module
    for name, module in adapted.items():
        layer = copy.deepcopy(module)
        for part in reversed([m for m in layer.modules() if _is_adapter(m)]):  # one in another
            if not part.merged:
                part.merge()
        for part, tensor in layer.get_base_layer().state_dict().items():
            yield f"{name}.{part}", tensor
    for name, tensor in inner.state_dict().items():
        if any(name.startswith(f"{n}.") for n in adapted) or ".original_module." in name:
            continue
        # what is trained whole beside an adapter stands for the original
        yield re.sub(r"\.modules_to_save\.[^.]+", "", name), full_weight(tensor)


def _is_adapter(module: Any) -> bool:
    return hasattr(module, "get_base_layer") and hasattr(module, "merge")


class WeightFolder:
    """One folder of weights after another, the last of which is kept.

    Each version has a path of its own, so that no server can take a file it has read before for the
    present one.
    """

    def __init__(self, root: str | None) -> None:
        self._temporary = None if root else tempfile.TemporaryDirectory(prefix="fused-grpo-")
        self.root = Path(root or self._temporary.name)  # type: ignore[union-attr]
        self.version = 0

    @property
    def name(self) -> str:
        """Of the present version."""
        return f"policy-{self.version:06d}"

    @property
    def path(self) -> Path:
        return (self.root / self.name).absolute()

    def next(self) -> None:
        self.version += 1

    def write_model(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """Everything that is needed to load the model."""
        causal_lm(model).save_pretrained(self.path, state_dict=weights)

    def write_adapter(self, model: Any) -> None:
        """The adapter alone, in PEFT's format."""
        model.save_pretrained(self.path)

    def keep_only_last(self) -> None:
        for folder in self.root.glob("policy-*"):
            if folder.name != self.name:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()
