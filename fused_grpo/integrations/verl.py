"""verl 0.9.1 on this package's path: its fused heads replaced, and its policy losses once more.

    VERL_USE_EXTERNAL_MODULES=fused_grpo.integrations.verl_plugin python3 -m verl.trainer.main_ppo \
        actor_rollout_ref.model.use_fused_kernels=True \
        actor_rollout_ref.actor.policy_loss.loss_mode=fused_vanilla ...

verl imports the module of that name in every worker; it calls `patch()` and `register()`. What they
do, and the differences that remain, is in docs/integrations.md, "verl".
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from fused_grpo.checks import check_choice, check_number
from fused_grpo.integrations.patching import Patch, Replacement, check_version, holders
from fused_grpo.integrations.verl_losses import LOSSES, compute_policy_loss
from fused_grpo.loss import linear_logprobs

SUPPORTED = ("0.9.1",)
BACKENDS = ("torch", "liger")


class FusedLinearForPPO(nn.Module):
    """verl's `FusedLinearForPPO`: log-probabilities and entropies of a head, both differentiable.

    The entropies come in the dtype of the hidden states with impl_backend="torch", as there, and
    in fp32 with "liger"; log-probabilities are fp32. `chunk_size` has no effect: chunks are chosen
    by memory.

    Call: (hidden_states [..., H], vocab_weights [V, H], input_ids [...], temperature > 0, a number
    or one per token) -> (log_probs [...], entropy [...]). An id of -100 gives 0 and no gradient, as
    with verl's "liger"; its "torch" fails.
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        check_choice("impl_backend", impl_backend, BACKENDS)
        check_number("chunk_size", chunk_size, lambda x: x >= 1, ">= 1")
        self.chunk_size = chunk_size
        self.impl_backend = impl_backend

    def forward(
        self,
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float | Tensor = 1.0,
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropy = _head(hidden_states, vocab_weights, input_ids, temperature)
        if self.impl_backend == "torch":
            entropy = entropy.to(hidden_states.dtype)
        return log_probs, entropy


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """verl's `linear_cross_entropy`: flat fp32 log-probabilities and entropies [tokens].

    Raises:
        ValueError: a reduction other than "none", which verl never asks for; a process group of
            several ranks: the vocabulary would be split, this head takes all of it.
    """
    check_choice("reduction", reduction, ("none",))
    if dist_process_group is not None and torch.distributed.get_world_size(dist_process_group) > 1:
        raise ValueError(
            "dist_process_group has several ranks: a head whose vocabulary is split over them is "
            "not replaced; leave verl's own in place there (unpatch), or use tensor parallel size 1"
        )
    flat = hidden.reshape(-1, hidden.shape[-1])
    return _head(flat, weight, labels.reshape(-1), temperature)


def _head(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float | Tensor
) -> tuple[Tensor, Tensor]:
    out = linear_logprobs(
        hidden, weight, ids.to(torch.int64), temperature=temperature, entropy=True
    )
    assert out.entropy is not None
    return out.logps, out.entropy


# ---- in verl's place


def _replacements() -> list[Replacement]:
    check_version("verl", SUPPORTED)
    from verl.utils.experimental import torch_functional
    from verl.utils.kernel import linear_cross_entropy as kernel

    ours: list[tuple[object, Any]] = [
        (torch_functional.FusedLinearForPPO, FusedLinearForPPO),
        (kernel.linear_cross_entropy, linear_cross_entropy),
    ]
    return [(m, name, new) for old, new in ours for m, name in holders(("verl",), old)]


_PATCH = Patch("verl's fused head", _replacements)


def patch() -> Patch:
    """Puts ours in the place of `FusedLinearForPPO` (use_fused_kernels with impl_backend "torch" or
    "liger") and `linear_cross_entropy` ("triton"), in every module of verl that has imported them.
    Also usable as `with patch():`.

    Raises:
        RuntimeError: verl is not installed or not 0.9.1, or it is patched already.
    """
    return _PATCH.apply()


def unpatch() -> None:
    """Puts verl's own back.

    Raises:
        RuntimeError: it is not patched, or something else has taken the same place since.
    """
    _PATCH.undo()


def register() -> list[str]:
    """Adds every loss of `LOSSES` to verl's registry as "fused_" and its name, for
    `actor_rollout_ref.actor.policy_loss.loss_mode`; returns the names.

    Raises:
        RuntimeError: verl is not installed or not 0.9.1, or one of the names is taken.
    """
    check_version("verl", SUPPORTED)
    from verl.trainer.ppo import core_algos

    names = [f"fused_{name}" for name in LOSSES]
    taken = [name for name in names if name in core_algos.POLICY_LOSS_REGISTRY]
    if taken:
        raise RuntimeError(f"verl has policy losses of these names already: {', '.join(taken)}")
    for name in LOSSES:
        function = functools.partial(compute_policy_loss, name)
        core_algos.register_policy_loss(f"fused_{name}")(function)
    return names


def unregister() -> None:
    """Takes them out again.

    Raises:
        RuntimeError: they are not registered.
    """
    from verl.trainer.ppo import core_algos

    names = [f"fused_{name}" for name in LOSSES]
    if not all(name in core_algos.POLICY_LOSS_REGISTRY for name in names):
        raise RuntimeError("the policy losses are not registered")
    for name in names:
        del core_algos.POLICY_LOSS_REGISTRY[name]
