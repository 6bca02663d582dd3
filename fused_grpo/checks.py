"""Checks of what callers give: every error is raised here or in `batch`, before any work."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def wide_dtype(x: Tensor) -> torch.dtype:
    """fp64 for what is small and should be exact, on the devices that have it."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def check_transforms(call: str) -> None:
    """RuntimeError inside of a transform of torch.func, none of which the head's passes support."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{call} does not go through torch.func (grad, vjp, jvp, vmap, hessian, ...): take its "
            "gradients by torch.autograd, and give batches as batches. policy_loss does"
        )


def no_forward_mode(*_: Any) -> Any:
    """In the place of an autograd function's derivative in forward mode."""
    raise RuntimeError(
        "the passes over a head have no forward-mode derivatives (torch.autograd.forward_ad): use "
        "backward or torch.autograd.grad; policy_loss has both"
    )


def check_tensor(
    name: str, value: object, device: torch.device | None, floating: bool | None
) -> None:
    """TypeError unless `value` is a floating (an integer) tensor, ValueError on another device, and
    on one without values."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")
    is_integer = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    if floating is True and not value.is_floating_point():
        raise TypeError(f"{name} must be floating point, not {value.dtype}")
    if floating is False and not is_integer:
        raise TypeError(f"{name} must hold integers, not {value.dtype}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} is on {value.device}, the hidden states are on {device}")
    if value.device.type == "meta":
        raise ValueError(f"{name} is on the meta device, where tensors have no values")


def check_number(name: str, value: Any, holds: Callable[[Any], bool], must: str) -> None:
    """TypeError unless `value` is a plain number, ValueError unless it `holds`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not holds(value):
        raise ValueError(f"{name}={value} must be {must}")


def check_range(name: str, value: float, hidden: Tensor, weight: Tensor) -> None:
    """ValueError for a number that would become 0 or infinite where it meets the logits."""
    dtype = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32
    limits = torch.finfo(dtype)
    if value != 0 and not limits.tiny <= abs(value) <= limits.max:
        raise ValueError(
            f"{name}={value} is out of the range of the logits' {dtype}: its size must be in "
            f"[{limits.tiny}, {limits.max}]"
        )


def check_choice(name: str, value: object, known: Iterable[str]) -> None:
    """ValueError unless `value` is one of `known`."""
    names = list(known)
    if value not in names:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(names)}")


def check_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    chunk_bytes: int | None,
    prefix: str = "",
) -> None:
    """hidden [..., H], weight [V, H], bias [V] fit together; the head's numbers are in range."""
    check_tensor(f"{prefix}hidden", hidden, None, floating=True)
    check_tensor(f"{prefix}weight", weight, hidden.device, floating=True)
    if type(weight).__name__ == "DTensor" or type(hidden).__name__ == "DTensor":
        raise ValueError(
            f"{prefix}hidden and {prefix}weight must be plain tensors, not DTensors: call the loss "
            "inside the module's forward, where FSDP has gathered the weight, or pass "
            f"full_weight({prefix}weight) of the module distributed; where the mesh shards the "
            "vocabulary of a tensor-parallel head, pass weight.to_local() and process_group="
        )
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(
            f"{prefix}weight must be [V, H], not {list(weight.shape)}; a flat or empty weight is a "
            "shard of FSDP or ZeRO-3: gather it first, one of ZeRO-3 with "
            "full_weight of the module distributed"
        )
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        hint = ""
        if hidden.dim() and hidden.shape[-1] == weight.shape[0]:
            hint = "; these look like logits: give the hidden states before the head"
        raise ValueError(
            f"{prefix}hidden {list(hidden.shape)} and {prefix}weight {list(weight.shape)} differ "
            f"in their last dimension{hint}"
        )
    if bias is not None:
        check_tensor(f"{prefix}bias", bias, hidden.device, floating=True)
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"{prefix}bias has shape {list(bias.shape)}, {prefix}weight {list(weight.shape)}: "
                f"it must be [{weight.shape[0]}]"
            )
    check_number(f"{prefix}logit_scale", logit_scale, math.isfinite, "finite")
    check_range(f"{prefix}logit_scale", logit_scale, hidden, weight)
    if softcap is not None:
        check_number(f"{prefix}softcap", softcap, lambda c: 0 < c < math.inf, "> 0, or None")
        check_range(f"{prefix}softcap", softcap, hidden, weight)
    if chunk_bytes is not None:
        check_number("chunk_bytes", chunk_bytes, lambda b: b >= 1, ">= 1, or None")


def check_lora(
    hidden: Tensor, weight: Tensor, lora_hidden: Tensor | None, lora_weight: Tensor | None
) -> None:
    """lora_hidden [..., r] and lora_weight [V, r] come together, and fit hidden and weight."""
    if lora_hidden is None and lora_weight is None:
        return
    if lora_hidden is None or lora_weight is None:
        given, missing = ("weight", "hidden") if lora_hidden is None else ("hidden", "weight")
        raise ValueError(f"lora_{given} needs lora_{missing}: the adapter adds their product")
    for name, value in (("lora_hidden", lora_hidden), ("lora_weight", lora_weight)):
        check_tensor(name, value, hidden.device, floating=True)
        if type(value).__name__ == "DTensor":
            raise ValueError(f"{name} must be a plain tensor, not a DTensor")
    if lora_weight.dim() != 2 or lora_weight.shape[0] != weight.shape[0] or not lora_weight.numel():
        raise ValueError(
            f"lora_weight must be [V, r] with the vocabulary of weight {list(weight.shape)} and "
            f"r >= 1, not {list(lora_weight.shape)}"
        )
    if lora_hidden.shape != (*hidden.shape[:-1], lora_weight.shape[1]):
        raise ValueError(
            f"lora_hidden has shape {list(lora_hidden.shape)}: with hidden {list(hidden.shape)} "
            f"and lora_weight {list(lora_weight.shape)} it must be "
            f"{[*hidden.shape[:-1], lora_weight.shape[1]]}"
        )


def check_targets(
    name: str,
    target: Tensor,
    temperature: Tensor | float,
    vocab: int,
    check: bool | None,
    of: str = "temperature",
) -> tuple[Tensor, Tensor | float]:
    """Counted targets [n] in [0, vocab) and temperatures [n] > 0, or ValueError.

    Where raising would make a GPU wait (`check` None, not on a CPU), a bad token's temperature
    becomes NaN, and
    with it all its results: never a plausible number.
    """
    bad = (target < 0) | (target >= vocab)
    if isinstance(temperature, Tensor):
        bad_temperature = ~(temperature > 0)
    else:
        check_number(of, temperature, lambda t: 0 < t < math.inf, "> 0")
        bad_temperature = torch.zeros_like(bad)
    if check is None:
        check = target.device.type == "cpu"
    if not check:
        nan = torch.where(bad | bad_temperature, torch.nan, temperature)
        return target.clamp(0, vocab - 1), nan
    if bad.any():
        raise ValueError(
            f"{name} holds {int(target[bad][0])} where it counts; with weight [V, H], V = {vocab}, "
            f"it must be in [0, {vocab})"
        )
    if bad_temperature.any():
        raise ValueError(f"{of} holds a value that is not > 0 at a token that counts")
    return target, temperature


def imported_function(argument: str, name: str) -> Callable[..., Any]:
    """The function that `argument`, "module:function", names; ValueError if there is none."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(
            f"{argument}={name!r}: no function {attribute!r} in an installed module {module!r} "
            f"({error})"
        ) from error
    if not callable(function):
        raise ValueError(f"{argument}={name!r} is not a function, but {type(function).__name__}")
    return function
