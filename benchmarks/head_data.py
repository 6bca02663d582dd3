"""Inputs of the size of real models' heads, and their exact answers without [N, V] in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.data import Case

# name -> hidden size, vocabulary
MODELS = {
    "qwen3-0.6b": (1024, 151_936),
    "qwen3-8b": (4096, 151_936),
    "llama-3-8b": (4096, 128_256),
    "gemma-2-9b": (3584, 256_000),
    "tiny-head": (32, 257),
}
DEFAULT_MODELS = ("qwen3-0.6b", "qwen3-8b", "llama-3-8b", "gemma-2-9b")
ROWS = 64  # of each gradient that are compared with fp64
CHUNK = 256  # tokens of fp64 logits at once


def head_case(name: str, tokens: int, device: str, dtype: torch.dtype) -> Case:
    """Random states and head with logits of a few nats, made on the device; no padding, so that the
    number of tokens is exact. Old log-probabilities are near the true ones."""
    width, vocab = MODELS[name]
    gen = torch.Generator(device).manual_seed(0)
    batch = max(1, tokens // 1024)
    length = tokens // batch

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=device)

    case = Case(
        name=name,
        hidden=normal(batch, length, width).to(dtype),
        weight=(normal(vocab, width) * (3.0 / width**0.5)).to(dtype),
        ids=torch.randint(vocab, (batch, length), generator=gen, device=device),
        mask=torch.ones(batch, length, dtype=torch.bool, device=device),
        advantages=normal(batch),
        old=torch.zeros(batch, length, device=device),
        ref=torch.zeros(batch, length, device=device),
    )
    logps, _ = exact_rows(case)
    near = logps.float().view(batch, length)
    case.old.copy_(near + 0.1 * normal(batch, length))
    return case


# --- the truth, in fp64, without [N, V] ----------------------------------------------------------


@torch.no_grad()
def exact_rows(case: Case) -> tuple[Tensor, Tensor]:
    """(log-probabilities [N], logsumexp [N]) in fp64, CHUNK tokens at a time."""
    hidden, ids = case.hidden.flatten(0, 1), case.ids.flatten()
    weight = case.weight.double()
    lse, z_y = [], []
    for h, y in zip(hidden.split(CHUNK), ids.split(CHUNK), strict=True):
        z = h.double() @ weight.T
        lse.append(torch.logsumexp(z, -1))
        z_y.append(z.gather(1, y[:, None]).squeeze(1))
    return torch.cat(z_y) - torch.cat(lse), torch.cat(lse)


@torch.no_grad()
def truth(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """fp64: log-probabilities [N], the first ROWS rows of dh, and ROWS rows of dW."""
    logps, lse = exact_rows(case)
    with torch.enable_grad():
        leaf = logps.requires_grad_()
        advantages = case.advantages.double().repeat_interleave(case.ids.shape[1])
        ratio = torch.exp(leaf - case.old.flatten().double())
        clipped = ratio.clamp(1 - case.epsilon, 1 + case.epsilon)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        (g,) = torch.autograd.grad(loss, leaf)
    hidden, ids, weight = case.hidden.flatten(0, 1).double(), case.ids.flatten(), case.weight
    n = min(ROWS, len(ids))
    wide = weight.double()
    p = torch.exp(hidden[:n] @ wide.T - lse[:n, None])
    dh = g[:n, None] * (wide[ids[:n]] - p @ wide)
    rows = weight_rows(case)
    p = torch.exp(hidden @ wide[rows].T - lse[:, None])
    hit = (ids[:, None] == rows[None, :]).double()
    return logps.detach(), dh, (g[:, None] * (hit - p)).T @ hidden


def weight_rows(case: Case) -> Tensor:
    """Rows of the weight to compare: half are targets, half are whatever stands first."""
    half = ROWS // 2
    first = torch.arange(half, device=case.ids.device)
    return torch.cat([case.ids.flatten()[:half], first]).unique()
