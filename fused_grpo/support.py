"""The sampling support: the vocabulary entries a sampler could have drawn, per token.

Samplers that cut the tail (top-k, top-p, min-p) draw from a distribution renormalised over what
they keep. A policy trained on such samples over the whole vocabulary sees ratios biased by the mass
that was cut; taking its log-probabilities over the same entries removes the bias (the "keep
sampling mask" of DeepSeek-V3.2, arXiv 2512.02556). Entries outside are given the logit -inf, and
everything else follows: log-probabilities, entropy and gradients, for which the support is a
constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from fused_grpo.checks import check_number, check_tensor, wide_dtype
from fused_grpo.memory import cutoff_rows, slices

# candidates looked at before all of a row is sorted: nearly every nucleus is smaller
_CANDIDATES = 1024


class SupportOptions(TypedDict, total=False):
    """Options of `linear_logprobs` and `grpo_loss`: an entry is kept if it passes all conditions.

    support_top_k: the k likeliest entries of this policy (k >= 1), ties with the last one included.
    support_top_p: of what top_k leaves, renormalised, the likeliest entries whose mass first
        reaches top_p, in (0, 1], ties with the last one included.
    support_min_p: at least min_p, in [0, 1], times the probability of the likeliest entry.
    support_min_logp: log-probability over the whole vocabulary >= this; a tensor, one per token.
    support_min_logit: logit (after softcap and temperature) >= this; a tensor, one per token.
    support_ids: [..., K] integers, the kept ids of each token, padded with -1: the sampler's own
        support, which stays what it was when the policy moves.
    """

    support_top_k: int | None
    support_top_p: float | None
    support_min_p: float | None
    support_min_logp: Tensor | None
    support_min_logit: Tensor | None
    support_ids: Tensor | None


@dataclass(frozen=True)
class Support:
    """Checked options, for n flat tokens."""

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    min_logp: Tensor | None = None  # [n]
    min_logit: Tensor | None = None  # [n]
    ids: Tensor | None = None  # [N, K] of all positions, -1 where there is none; never copied whole
    index: Tensor | None = None  # [n] positions of the tokens among them

    @property
    def needs_logits(self) -> bool:
        """Whether all logits of a token have to be known before any can be left out."""
        return any(x is not None for x in (self.top_k, self.top_p, self.min_p, self.min_logp))

    def __getitem__(self, span: slice) -> Support:
        """That of a chunk [c], with `ids` [c, K] int64."""
        ids = self.ids
        if ids is not None and self.index is not None:
            ids = ids[self.index[span]].long()
        logp, logit = (None if x is None else x[span] for x in (self.min_logp, self.min_logit))
        return Support(self.top_k, self.top_p, self.min_p, logp, logit, ids)

    def cutoff(self, logits: Tensor | None) -> Tensor | None:
        """[c] the smallest logit that is kept, from all logits [c, V] where they are needed."""
        cut = self.min_logit
        if not self.needs_logits:
            return cut
        assert logits is not None
        found = logits.new_empty(logits.shape[0])
        for rows in slices(logits.shape[0], cutoff_rows(*logits.shape)):
            min_logp = None if self.min_logp is None else self.min_logp[rows]
            found[rows] = self._cutoff_of(logits[rows], min_logp)
        return found if cut is None else torch.maximum(found, cut.to(found.dtype))

    def _cutoff_of(self, z: Tensor, min_logp: Tensor | None) -> Tensor:
        cut = z.new_full((z.shape[0],), -torch.inf)
        if self.top_k is not None:
            cut = z.topk(min(self.top_k, z.shape[1])).values[:, -1]
        if self.top_p is not None and self.top_p < 1:
            cut = torch.maximum(cut, _nucleus(z, cut, self.top_p))
        if self.min_p:
            cut = torch.maximum(cut, z.amax(1) + math.log(self.min_p))
        if min_logp is not None:
            cut = torch.maximum(cut, torch.logsumexp(z, 1) + min_logp.to(z.dtype))
        return cut


def _nucleus(z: Tensor, floor: Tensor, top_p: float) -> Tensor:
    """[r] the smallest logit of the likeliest entries >= floor whose share first reaches top_p."""
    kept = z.masked_fill(z < floor[:, None], -torch.inf)
    log_mass = torch.logsumexp(kept, 1, keepdim=True)
    vocab = z.shape[1]
    # a GPU would wait for the answer to "was that enough?"
    sizes = (_CANDIDATES, vocab) if z.device.type == "cpu" and vocab > _CANDIDATES else (vocab,)
    for size in sizes:
        values = kept.topk(size).values
        share = (values - log_mass).to(wide_dtype(z)).exp_()
        upto = share.cumsum(1)
        if size == vocab or bool((upto[:, -1] >= top_p).all()):
            break
    last = (upto - share < top_p).sum(1).clamp_min(1) - 1
    return values.gather(1, last[:, None])[:, 0]


class ChunkSupport:
    """The support of a chunk's tokens, applied tile by tile to logits without their target.

    `size` [c] counts what is kept, the target included.
    """

    def __init__(self, support: Support, cutoff: Tensor | None, target: Tensor) -> None:
        self.cutoff, self.ids = cutoff, support.ids
        self.size = torch.ones_like(target)

    def restrict(self, z: Tensor, v: slice) -> None:
        """-inf, in place, at the entries of a tile that are outside."""
        if self.cutoff is not None:
            z.masked_fill_(z < self.cutoff[:, None], -torch.inf)
        if self.ids is not None:
            outside = torch.ones(z.shape, dtype=torch.bool, device=z.device)
            row, k = ((self.ids >= v.start) & (self.ids < v.stop)).nonzero(as_tuple=True)
            outside[row, self.ids[row, k] - v.start] = False
            z.masked_fill_(outside, -torch.inf)
        self.size += (z != -torch.inf).sum(1)

    def lacks(self, target: Tensor, z_target: Tensor) -> Tensor:
        """[c] whether the target is outside, and kept nevertheless."""
        outside = torch.zeros_like(target, dtype=torch.bool)
        if self.cutoff is not None:
            outside |= z_target < self.cutoff
        if self.ids is not None:
            outside |= (self.ids != target[:, None]).all(1)
        return outside


def make_support(
    options: dict[str, Any], shape: torch.Size, index: Tensor, vocab: int, check: bool | None
) -> tuple[Support | None, Tensor | None]:
    """(the support of the counted tokens at `index`, which of them have bad values [n]).

    `shape` is that of the ids. Bad values, NaN thresholds and ids outside [-1, V), raise on a CPU
    or with `check`; elsewhere the caller has to poison the tokens. (None, None): no support.
    """
    given = {k.removeprefix("support_"): v for k, v in options.items() if v is not None}
    if not given:
        return None, None
    _check_numbers(given)
    bad = torch.zeros_like(index, dtype=torch.bool)
    for name in ("min_logp", "min_logit"):
        if name in given:
            given[name] = _threshold(name, given[name], shape, index)
            bad |= given[name].isnan()
    if "ids" in given:
        given["ids"], given["index"] = _ids(given["ids"], shape, index), index
        for rows in slices(index.numel(), 1024):  # not all of them at once, they may be large
            chosen = given["ids"][index[rows]]
            bad[rows] |= ((chosen < -1) | (chosen >= vocab)).any(-1)
    if check is None:
        check = index.device.type == "cpu"
    if check and bad.any():
        raise ValueError(
            "support_min_logp, support_min_logit and support_ids must hold no NaN, and ids in "
            f"[0, {vocab}) or -1 for padding, where a token counts"
        )
    return Support(**given), bad


def _check_numbers(given: dict[str, Any]) -> None:
    for name, holds, must in (
        ("top_k", lambda k: k >= 1 and k == int(k), "an integer >= 1, or None"),
        ("top_p", lambda p: 0 < p <= 1, "in (0, 1], or None"),
        ("min_p", lambda p: 0 <= p <= 1, "in [0, 1], or None"),
    ):
        if name in given:
            check_number(f"support_{name}", given[name], holds, must)
    if "top_k" in given:
        given["top_k"] = int(given["top_k"])


def _threshold(name: str, value: Any, shape: torch.Size, index: Tensor) -> Tensor:
    check_tensor(f"support_{name}", value, index.device, floating=True)
    if value.shape != shape:
        raise ValueError(
            f"support_{name} has shape {list(value.shape)}: give one per token, {list(shape)}"
        )
    return value.detach().reshape(-1)[index]


def _ids(value: Any, shape: torch.Size, index: Tensor) -> Tensor:
    check_tensor("support_ids", value, index.device, floating=False)
    if value.dim() != len(shape) + 1 or value.shape[:-1] != shape:
        raise ValueError(
            f"support_ids has shape {list(value.shape)}: give the kept ids of each token, "
            f"{[*shape, 'K']}, padded with -1"
        )
    return value.detach().reshape(shape.numel(), value.shape[-1])
