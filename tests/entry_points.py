"""Every public call on one small batch, for the tests of what holds for all of them.

`TENSORS` are the arguments; a call takes them by name and gives the tensors of its result, the
differentiable ones first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_grpo import (
    GRPOLoss,
    compute_advantages,
    group_relative_advantages,
    grpo_loss,
    linear_kl,
    linear_logprobs,
    linear_support,
    multi_reward_advantages,
    policy_loss,
    sampling_statistics,
    token_weights,
    zero_variance_fraction,
)

ROWS, WIDTH, DIM, VOCAB = 3, 5, 8, 37
CHUNKS = 1 << 11  # bytes: several chunks, so that what spans them takes its own path


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """All arguments on the CPU; those of tokens in fp32, in fp64 for fp64."""
    g = torch.Generator("cpu").manual_seed(seed)
    vectors = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64, device="cpu").to(to)

    tokens = (ROWS, WIDTH)
    mask = torch.ones(tokens, dtype=torch.bool, device="cpu")
    mask[0, 3:] = mask[1, 1] = False
    out = {
        "hidden": normal(*tokens, DIM),
        "weight": normal(VOCAB, DIM),
        "bias": normal(VOCAB),
        "lora_hidden": normal(*tokens, 2),
        "lora_weight": normal(VOCAB, 2),
        "ref_hidden": normal(*tokens, 3),
        "ref_weight": normal(VOCAB, 3),
        "ids": torch.randint(VOCAB, tokens, generator=g, device="cpu"),
        "advantages": normal(ROWS, to=vectors),
        "mask": mask,
        "temperature": 0.5 + normal(*tokens, to=vectors).abs(),
        "logps": -normal(*tokens, to=vectors).abs(),
        "entropies": normal(*tokens, to=vectors).abs(),
    }
    for name in ("old", "ref", "sampled"):
        out[name] = out["logps"] + 0.3 * normal(*tokens, to=vectors)
    out["rewards"] = torch.randint(3, (2, 4), generator=g, device="cpu").to(vectors)
    return out


T = dict[str, Tensor]


def masked_ids(t: T) -> Tensor:
    return t["ids"].masked_fill(~t["mask"], -100)


def loss(t: T, call: Callable[..., Any] = grpo_loss, **options: Any) -> list[Tensor]:
    vectors = {"completion_mask": t["mask"], "old_per_token_logps": t["old"]}
    if "beta" in options and "ref_hidden" not in options:
        vectors["ref_per_token_logps"] = t["ref"]
    out = call(
        t["hidden"],
        t["weight"],
        t["ids"],
        t["advantages"],
        **({"bias": t["bias"], "temperature": t["temperature"], "chunk_bytes": CHUNKS} | options),
        **vectors,
    )
    rest = [out.per_token_logps, *([] if out.entropy is None else [out.entropy])]
    return [out.loss, *rest, *(out.metrics[k] for k in sorted(out.metrics))]


def logprobs(t: T, **options: Any) -> list[Tensor]:
    given = {"bias": t["bias"], "temperature": t["temperature"], "chunk_bytes": CHUNKS} | options
    out = linear_logprobs(t["hidden"], t["weight"], masked_ids(t), **given)
    fields = (out.logps, out.entropy, out.support_size, out.target_outside, out.lse, out.is_top1)
    return [x for x in fields if x is not None]


def policy(t: T, **options: Any) -> list[Tensor]:
    out = policy_loss(
        t["logps"],
        t["advantages"],
        completion_mask=t["mask"],
        old_per_token_logps=t["old"],
        ref_per_token_logps=t["ref"],
        sampling_per_token_logps=t["sampled"],
        entropies=t["entropies"],
        beta=0.1,
        entropy_coef=0.2,
        sampling_correction="token_truncate",
        **options,
    )
    return [out.loss, *(out.metrics[k] for k in sorted(out.metrics))]


@dataclass(frozen=True)
class Entry:
    call: Callable[[T], list[Tensor]]
    leaves: tuple[str, ...] = ("hidden", "weight", "bias")
    outputs: int = 1  # how many of its results are differentiable


ROUTED: dict[str, Any] = {
    "backward": "routed",
    "route_tau": 0.5,
}  # less, and with so few entries all are kept
SEEDED: dict[str, Any] = ROUTED | {"route_seed": 7}
WITH_LORA = ("hidden", "weight", "bias", "lora_hidden", "lora_weight")


def lora(t: T) -> T:
    return {k: t[k] for k in ("lora_hidden", "lora_weight")}


def full_kl(t: T) -> dict[str, Any]:
    return {k: t[k] for k in ("ref_hidden", "ref_weight")}


HEAD: dict[str, Entry] = {
    "grpo_loss": Entry(lambda t: loss(t, beta=0.1, entropy_coef=0.1)),
    "grpo_loss sequence": Entry(
        lambda t: loss(t, beta=0.1, importance_sampling_level="sequence", loss_type="grpo")
    ),
    "grpo_loss none": Entry(lambda t: loss(t, beta=0.1, reduction="none")),
    "grpo_loss routed": Entry(lambda t: loss(t, **SEEDED)),
    "grpo_loss routed sequence": Entry(
        lambda t: loss(t, importance_sampling_level="sequence", **SEEDED)
    ),
    "grpo_loss lora": Entry(lambda t: loss(t, entropy=True, **lora(t)), WITH_LORA),
    "grpo_loss full": Entry(lambda t: loss(t, beta=0.1, kl_estimator="full", **full_kl(t))),
    "grpo_loss support": Entry(lambda t: loss(t, support_top_k=9)),
    "grpo_loss reference": Entry(
        lambda t: loss(t, beta=0.1, backend="reference", chunk_bytes=None)
    ),
    "GRPOLoss": Entry(lambda t: loss(t, GRPOLoss(loss_type="grpo", epsilon_high=0.3), beta=0.1)),
    "linear_logprobs": Entry(logprobs),
    "linear_logprobs entropy": Entry(
        lambda t: logprobs(t, entropy=True, outputs=("lse", "is_top1")), outputs=2
    ),
    "linear_logprobs routed": Entry(lambda t: logprobs(t, entropy=True, **SEEDED), outputs=2),
    "linear_logprobs lora": Entry(lambda t: logprobs(t, **lora(t)), WITH_LORA),
    "linear_logprobs support": Entry(lambda t: logprobs(t, support_top_p=0.8)),
    "linear_kl": Entry(
        lambda t: [
            linear_kl(
                t["hidden"],
                t["weight"],
                **full_kl(t),
                mask=t["mask"],
                bias=t["bias"],
                temperature=t["temperature"],
                chunk_bytes=CHUNKS,
            )
        ]
    ),
}
POLICY = {
    "policy_loss": Entry(policy, ("logps", "entropies")),
    "policy_loss none": Entry(lambda t: policy(t, reduction="none"), ("logps", "entropies")),
}
DIFFERENTIABLE = HEAD | POLICY
SUPPORT = Entry(
    lambda t: [linear_support(t["hidden"], t["weight"], top_p=0.8, bias=t["bias"], mask=t["mask"])],
    (),
    0,
)
CONSTANT = {
    "linear_support": SUPPORT,
    "compute_advantages": Entry(lambda t: [compute_advantages(t["rewards"])], (), 0),
    "group_relative_advantages": Entry(lambda t: [group_relative_advantages(t["rewards"])], (), 0),
    "multi_reward_advantages": Entry(
        lambda t: [multi_reward_advantages(t["rewards"].T.contiguous(), 2)], (), 0
    ),
    "zero_variance_fraction": Entry(lambda t: [zero_variance_fraction(t["rewards"])], (), 0),
    "token_weights": Entry(lambda t: [token_weights(t["mask"], "sequence_mean")], (), 0),
    "sampling_statistics": Entry(
        lambda t: list(
            sampling_statistics(t["logps"], t["sampled"], completion_mask=t["mask"]).values()
        ),
        (),
        0,
    ),
}
ENTRIES = DIFFERENTIABLE | CONSTANT


def with_leaves(t: T, names: Iterable[str]) -> T:
    """The same arguments, those of the names as fresh leaves."""
    return t | {name: t[name].detach().clone().requires_grad_() for name in names}


def upstream(out: Tensor, seed: int = 5) -> Tensor:
    """A fixed gradient of an output; of a scalar one, 1.5."""
    if out.dim() == 0:
        return torch.full_like(out, 1.5)
    g = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(out.shape, generator=g, dtype=torch.float64, device="cpu").to(out)


def results(entry: Entry, t: T, wanted: Iterable[str] | None = None) -> list[Tensor]:
    """Values, then the gradients of the leaves (of those that are wanted)."""
    leaves = entry.leaves if wanted is None else tuple(wanted)
    t = with_leaves(t, leaves)
    out = entry.call(t)
    found = [x.detach() for x in out]
    if not leaves:
        return found
    heads = out[: entry.outputs]
    torch.autograd.backward(heads, [upstream(x) for x in heads])
    for name in leaves:
        grad = t[name].grad
        assert grad is not None, name
        found.append(grad)
    return found


def assert_same_bits(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype, (i, a.dtype, b.dtype)
        assert a.device == b.device, i
        assert torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0)), i
