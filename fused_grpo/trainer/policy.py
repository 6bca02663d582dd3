"""The model that learns and the reference it is compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fused_grpo.integrations.models import is_sharded
from fused_grpo.trainer import setup
from fused_grpo.trainer.batches import MicroBatch
from fused_grpo.trainer.sharding import shard


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

    def shard_reference(self, accelerator: Any) -> None:
        """Shards the copy as accelerate has sharded the model (FSDP2)."""
        if self.reference is not None and is_sharded(self.model):
            self.reference = shard(self.reference, accelerator)

    def at_head(self, batch: MicroBatch, head_fn: Any) -> Any:
        """What `head_fn` makes of the hidden states of a micro-batch and the head."""
        return _at_head(self.model, batch, head_fn)

    def at_reference(self, batch: MicroBatch, head_fn: Any) -> Any:
        """The same of the reference."""
        if self.reference is not None:
            return _at_head(self.reference, batch, head_fn)
        with self.model.disable_adapter():
            return _at_head(self.model, batch, head_fn)


@torch.no_grad()
def _at_head(model: nn.Module, batch: MicroBatch, head_fn: Any) -> Any:
    model.eval()
    return model(**batch.model_inputs(model), head_fn=head_fn)
