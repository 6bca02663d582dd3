"""The ids that a sampler keeps, from hidden states: what `support_ids` takes."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_grpo.calls import counted_positions, make_call
from fused_grpo.checks import check_head, check_lora, check_transforms
from fused_grpo.memory import DEFAULT_CHUNK_BYTES, slices
from fused_grpo.passes import Needs
from fused_grpo.tiles import LogitTiles
from fused_grpo.workspace import Workspace, plan_pass


@torch.no_grad()
def linear_support(
    hidden: Tensor,
    weight: Tensor,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    lora_hidden: Tensor | None = None,
    lora_weight: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    check_inputs: bool | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Tensor:
    """The vocabulary entries that top-k, top-p and min-p leave at every position.

    Call it with the policy that sampled, and give the result to `grpo_loss(support_ids=...)` for
    as long as its samples are used. The rules are those of `support.SupportOptions`.

    Args:
        hidden: [..., H]; weight: [V, H]; bias: [V].
        top_k, top_p, min_p: at least one of them.
        mask: [...] boolean or 0/1: elsewhere all ids are -1.
        lora_hidden, lora_weight, temperature, logit_scale, softcap, check_inputs, chunk_bytes: as
            in `linear_logprobs`; the result is not part of the budget.

    Returns:
        [..., K] int64, ascending, padded with -1; K is the size of the largest support, which for
        top_p and min_p alone may be as large as the vocabulary.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what fits.
    """
    check_transforms("linear_support")
    check_head(hidden, weight, bias, logit_scale, softcap, chunk_bytes)
    check_lora(hidden, weight, lora_hidden, lora_weight)
    if top_k is None and top_p is None and min_p is None:
        raise ValueError("give at least one of top_k, top_p and min_p: there is nothing to keep")
    lead = hidden.shape[:-1]
    index = counted_positions(mask, hidden)
    call = make_call(
        "mask",
        torch.zeros_like(index),
        index,
        lead,
        hidden,
        weight,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        chunk_bytes=chunk_bytes,
        check=check_inputs,
        support={"support_top_k": top_k, "support_top_p": top_p, "support_min_p": min_p},
    )
    flat, lora_flat = (
        None if x is None else x.reshape(-1, x.shape[-1]) for x in (hidden, lora_hidden)
    )
    assert flat is not None
    tokens, head = call.bind(flat, weight, bias, lora_flat, lora_weight)
    plan = plan_pass(tokens, head, Needs(), chunk_bytes)
    work = Workspace.allocate(plan, tokens, head, Needs(), None)
    found = []
    with torch.autocast(hidden.device.type, enabled=False):
        for span in slices(index.numel(), plan.tokens):
            rows = tokens.rows(span)
            assert work.logits is not None
            assert tokens.support is not None
            z = work.logits[: rows.shape[0]]
            temperatures = tokens.temperatures(span, z.dtype)
            lora_rows = tokens.lora_rows(span)
            logits = LogitTiles(rows, temperatures, head, work.weight_tile, lora_rows)
            for v in slices(weight.shape[0], plan.tile):
                z[:, v] = logits(v)
            cutoff = tokens.support[span].cutoff(z)
            assert cutoff is not None
            found.append(_ids(z, cutoff))
    width = max((ids.shape[1] for ids in found), default=0)
    out = index.new_full((lead.numel(), width), -1)
    for span, ids in zip(slices(index.numel(), plan.tokens), found, strict=True):
        out[index[span], : ids.shape[1]] = ids
    return out.view(*lead, width)


def _ids(z: Tensor, cutoff: Tensor) -> Tensor:
    """[c, K] of [c, V]: the columns that are kept, ascending, then -1."""
    kept = (z >= cutoff[:, None]) & (z != -torch.inf)  # what nobody can draw is in no support
    kept |= z.isnan()  # and what is broken stays to be seen
    row, column = kept.nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=z.shape[0])
    ids = column.new_full((z.shape[0], int(counts.amax())), -1)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    ids[row, torch.arange(row.numel(), device=z.device) - first] = column
    return ids
