"""The model that learns and the reference it is compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import TrainerCallback

from fused_grpo.integrations.models import is_sharded
from fused_grpo.integrations.routing import recording, replaying
from fused_grpo.trainer import setup
from fused_grpo.trainer.batches import MicroBatch
from fused_grpo.trainer.sharding import shard


class Policy:
    """A model and, where a KL asks for it, its reference.

    Attributes:
        model: that learns; its wrapper, if there is one, is the Trainer's affair.
        reference: a frozen copy, or None: adapters are switched off to get the reference.
        synced: whether the copy follows the policy.

    Raises:
        ValueError: a reference that follows, where the model has an adapter.
    """

    def __init__(self, model: Any, copy_reference: bool, synced: bool = False) -> None:
        if synced and setup.is_peft(model):
            raise ValueError(
                "sync_ref_model=True needs a reference of its own, but that of an adapter is the "
                "model without it, which does not move: set sync_ref_model=False"
            )
        self.model, self.synced = model, synced
        needs_copy = copy_reference and not setup.is_peft(model)
        self.reference: Any = setup.frozen_copy(model) if needs_copy else None

    def shard_reference(self, accelerator: Any) -> None:
        """Shards the copy as accelerate has sharded the model (FSDP2)."""
        if self.reference is not None and is_sharded(self.model):
            self.reference = shard(self.reference, accelerator)

    @torch.no_grad()
    def sync_reference(self, alpha: float) -> None:
        """reference <- (1 - alpha) * reference + alpha * policy (TR-DPO, arXiv 2404.09656)."""
        ours, theirs = self.model.parameters(), self.reference.parameters()
        for policy, reference in zip(ours, theirs, strict=True):
            reference.mul_(1.0 - alpha).add_(policy, alpha=alpha)

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint must hold: the weights of a reference that moves, else nothing.

        Of a sharded one all processes make them whole together.
        """
        if not self.synced:
            return {}
        return {name: _whole(value) for name, value in self.reference.state_dict().items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes what `state_dict` gave."""
        if self.synced:
            for name, value in self.reference.state_dict().items():
                value.copy_(_sharded_as(value, state[name]))

    def at_head(self, batch: MicroBatch, head_fn: Any) -> Any:
        """What `head_fn` makes of the hidden states of a micro-batch and the head."""
        with replaying(self.model, batch.experts):
            return _at_head(self.model, batch, head_fn)

    def record_experts(self, batch: MicroBatch) -> None:
        """Keep the experts that the policy uses now, for all its later forwards of the batch."""
        with recording(self.model) as tape:
            _at_head(self.model, batch, lambda hidden, head: None)
        batch.keep_experts(tape.experts(1 if batch.packed else len(batch)))

    def at_reference(self, batch: MicroBatch, head_fn: Any) -> Any:
        """The same of the reference, through experts of its own."""
        if self.reference is not None:
            return _at_head(self.reference, batch, head_fn)
        with self.model.disable_adapter():
            return _at_head(self.model, batch, head_fn)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value


def _sharded_as(value: Tensor, whole: Tensor) -> Tensor:
    """`whole` in the parts of `value`, if that has parts."""
    whole = whole.to(value.device)
    if not isinstance(value, DTensor):
        return whole
    return distribute_tensor(whole, value.device_mesh, value.placements)


@torch.no_grad()
def _at_head(model: nn.Module, batch: MicroBatch, head_fn: Any) -> Any:
    model.eval()
    return model(**batch.model_inputs(model), head_fn=head_fn)


class SyncReference(TrainerCallback):
    """Moves the reference after every `ref_model_sync_steps` optimizer steps, before a checkpoint.

    Log-probabilities of samples that exist already are not computed again.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % args.ref_model_sync_steps == 0:
            self.policy.sync_reference(args.ref_model_mixup_alpha)
