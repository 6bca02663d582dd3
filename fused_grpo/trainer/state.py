"""Nested Python values with tensors in one safetensors file: no pickle, nothing executed."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

# the dataclasses that a file may name, whatever else it says
SAVED = ("fused_grpo.trainer.batches:MicroBatch", "fused_grpo.trainer.collect:Generation")


def save_state(path: Path, state: Any) -> None:
    """Write tensors, numbers, strings, None, lists, tuples, dicts with string keys, `SAVED`.

    Raises:
        TypeError: saying where in `state` something else is.
    """
    tensors: dict[str, Tensor] = {}
    tree = _pack(state, "state", tensors)
    save_file(tensors, path, metadata={"tree": json.dumps(tree)})


def load_state(path: Path, device: torch.device | str = "cpu") -> Any:
    """What `save_state` was given; tensors that were not on the CPU go to `device`."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tree = json.loads(file.metadata()["tree"])
    return _unpack(tree, tensors, device)


def _pack(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        # a copy: rows of one sample share their memory, which the format does not know
        tensors[place] = value.detach().cpu().contiguous().clone()
        return {"tensor": place, "moved": value.device.type != "cpu"}
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    if name in SAVED:
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return {"dataclass": name, "fields": _pack(fields, place, tensors)}
    if isinstance(value, (list, tuple)):
        items = [_pack(item, f"{place}.{i}", tensors) for i, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {k: _pack(item, f"{place}.{k}", tensors) for k, item in value.items()}}
    raise TypeError(f"{place} of a checkpoint is a {type(value).__name__}, which cannot be saved")


def _unpack(tree: Any, tensors: dict[str, Tensor], device: torch.device | str) -> Any:
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        tensor = tensors[tree["tensor"]]
        return tensor.to(device) if tree["moved"] else tensor
    if "dataclass" in tree:
        return _class_named(tree["dataclass"])(**_unpack(tree["fields"], tensors, device))
    if "dict" in tree:
        return {key: _unpack(item, tensors, device) for key, item in tree["dict"].items()}
    ((kind, items),) = tree.items()
    unpacked = [_unpack(item, tensors, device) for item in items]
    return tuple(unpacked) if kind == "tuple" else unpacked


def _class_named(name: str) -> Any:
    if name not in SAVED:
        raise TypeError(f"a checkpoint names {name}, which is none of {', '.join(SAVED)}")
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
