"""The model that learns and the reference it is compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fused_grpo.integrations.routing import recording, replaying
from fused_grpo.trainer import setup
from fused_grpo.trainer.batches import MicroBatch


class Policy:
    """A model and, where a KL asks for it, its reference.

    Attributes:
        model: that learns; its wrapper, if there is one, is the Trainer's affair.
        reference: a frozen copy, or None: adapters are switched off to get the reference.
    """

    def __init__(self, model: Any, copy_reference: bool) -> None:
        self.model = model
        needs_copy = copy_reference and not setup.is_peft(model)
        self.reference: Any = setup.frozen_copy(model) if needs_copy else None

    def at_head(self, batch: MicroBatch, head_fn: Any) -> Any:
        """What `head_fn` makes of the hidden states of a micro-batch and the head."""
        with replaying(self.model, batch.routed_experts):
            return _at_head(self.model, batch, head_fn)

    def record_experts(self, batch: MicroBatch) -> None:
        """Keep the experts that the policy uses now, for all its later forwards of the batch."""
        with recording(self.model) as tape:
            _at_head(self.model, batch, lambda hidden, head: None)
        batch.routed_experts = tape.experts(len(batch))

    def at_reference(self, batch: MicroBatch, head_fn: Any) -> Any:
        """The same of the reference, through experts of its own."""
        if self.reference is not None:
            return _at_head(self.reference, batch, head_fn)
        with self.model.disable_adapter():
            return _at_head(self.model, batch, head_fn)


@torch.no_grad()
def _at_head(model: nn.Module, batch: MicroBatch, head_fn: Any) -> Any:
    model.eval()
    return model(**batch.model_inputs(model), head_fn=head_fn)
