"""Batches drawn by hypothesis from the package's own tables, and what must not change a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from cases import Case, exact_logps, make_case, with_reference
from hypothesis import strategies as st
from objective_cases import CORRECTIONS, OBJECTIVES, REDUCTIONS, applies, drop_unused, reduced
from torch import Tensor

from fused_grpo import grpo_loss
from fused_grpo.kl import ESTIMATORS
from fused_grpo.objectives import LOSS_TYPES

# Which tokens these draw hangs on the order of tokens where covariances are equal, as those of two
# tokens always are; with a ratio of 1 they draw all.
OF_THE_BATCH = {"clip_cov", "kl_cov"}
SEEDS = st.integers(0, 10**6)


def numbers(seed: int) -> Callable[..., Tensor]:
    g = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)


@st.composite
def options_of(draw: st.DrawFn, objective: str, estimator: str | None = None) -> dict[str, Any]:
    """Options that go with the objective: reduction, correction, KL, masks and bonuses."""
    options = dict(OBJECTIVES[objective])
    name = options.get("loss_type", "dapo")
    if name in OF_THE_BATCH:
        options["cov_ratio"] = 1.0
    fitting = [k for k, c in CORRECTIONS.items() if applies(options, c)]
    options |= CORRECTIONS[draw(st.sampled_from(fitting))]
    options = reduced(options, REDUCTIONS[draw(st.sampled_from(sorted(REDUCTIONS)))])
    options["entropy_coef"] = draw(st.sampled_from([0.0, 0.1]))
    options["positive_nll_coef"] = draw(st.sampled_from([0.0, 0.3]))
    if estimator is not None or draw(st.booleans()):
        options["beta"] = 0.2
        options["kl_estimator"] = estimator or draw(st.sampled_from(sorted(ESTIMATORS)))
        options["kl_clamp"] = draw(st.sampled_from([None, 0.7]))
        options["use_bias_correction_kl"] = draw(st.booleans())
    if LOSS_TYPES[name].uses_old and options.get("sampling_correction") != "bypass":
        options["off_policy_mask_threshold"] = draw(st.sampled_from([None, 0.05]))
    options["top_entropy_quantile"] = draw(st.sampled_from([1.0, 1.0, 0.37]))
    return options


@st.composite
def batches(
    draw: st.DrawFn,
    objective: str | None = None,
    estimator: str | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    empty: bool = True,
    heads: bool = True,
    leave_out: tuple[str, ...] = (),
) -> Case:
    """Any shape, mask and options; per-token temperatures, a reference head, a support.

    heads: whether a reference head or a support may be part of it, which few paths know.
    leave_out: options that stay at their defaults.
    """
    chosen = objective or draw(st.sampled_from(sorted(OBJECTIVES)))
    options = draw(options_of(chosen, estimator))
    options = {k: v for k, v in options.items() if k not in leave_out}
    given = options.pop("given", False)
    rows, width, seed = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(SEEDS)
    normal = numbers(seed + 1)
    head: dict[str, Any] = {
        "softcap": draw(st.sampled_from([None, 4.0])),
        "logit_scale": draw(st.sampled_from([1.0, 0.7])),
        "temperature": draw(st.sampled_from([1.0, 0.6, "each"])),
    }
    if head["temperature"] == "each":
        head["temperature"] = 0.5 + normal(rows, width).abs()
    case = make_case(
        seed=seed,
        rows=rows,
        width=width,
        dim=draw(st.integers(1, 6)),
        vocab=draw(st.integers(1, 40)),
        dtype=dtype,
        mask="ones",
        bias=draw(st.booleans()),
        old=draw(st.integers(0, 3)) > 0 or options.get("off_policy_mask_threshold") is not None,
        ref=bool(options.get("beta")),
        **options,
        **head,
    )
    flags = draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width))
    mask = torch.tensor(flags).view(rows, width)
    mask[0, 0] |= not empty
    case.tensors["completion_mask"] = mask
    _add_tensors(case, given, normal)
    if draw(st.booleans()):
        case.advantages = normal(rows, width).to(case.advantages.dtype)
    if heads and options.get("beta"):
        case = draw(_reference(case))
    if heads:
        case = case.with_options(**draw(st.sampled_from(SUPPORTS)))
    drop_unused(case)
    return case


SUPPORTS: list[dict[str, Any]] = [
    {},
    {},
    {"support_top_k": 5},
    {"support_top_p": 0.8},
    {"support_min_p": 0.05, "support_top_k": 20},
]


@st.composite
def _reference(draw: st.DrawFn, case: Case) -> Case:
    """As it is, or with a reference head, for the exact divergences too."""
    kind = draw(st.sampled_from(["as it is", "head", "full", "top_k"]))
    if kind == "as it is":
        return case
    case = with_reference(case, dim=draw(st.sampled_from([None, 3])))
    if kind == "head":
        return case
    options = {k: v for k, v in case.options.items() if k not in ("kl_clamp", "kl_estimator")}
    options |= {"use_bias_correction_kl": False, "kl_estimator": kind}
    if kind == "top_k":
        options["kl_top_k"] = 4
    return replace(case, options=options)


def _add_tensors(case: Case, given: bool, normal: Callable[..., Tensor]) -> None:
    shape, o = case.ids.shape, case.options
    if o.get("aggregation") == "group_mean":
        case.tensors["group_ids"] = torch.arange(shape[0]) * 3 // 5 + 2
    if {"sampling_correction", "rejection", "veto_ratio_min"} & set(o):
        base = case.tensors.get("old_per_token_logps", exact_logps(case))
        noise = 0.3 * normal(*shape)
        noise[normal(*shape) > 1.5] = torch.nan  # unknown
        case.tensors["sampling_per_token_logps"] = (base + noise).to(case.advantages.dtype)
    if given:
        case.tensors["importance_sampling_ratio"] = normal(*shape).abs().to(case.advantages.dtype)
    if o.get("entropy_coef"):
        case.tensors["entropy_scale"] = (1 + normal(*shape).abs()).to(case.advantages.dtype)


# ---- evaluating, and fields by what they belong to


@dataclass
class Outcome:
    loss: Tensor
    grads: dict[str, Tensor]
    metrics: dict[str, Tensor]
    output: Any


def evaluate(case: Case, upstream: Tensor | None = None, **extra: Any) -> Outcome:
    """`grpo_loss` and its gradients; with an upstream gradient [B, T] those of the token losses."""
    leaves = {k: v.requires_grad_() for k, v in case.leaves().items()}
    if upstream is not None:
        extra["reduction"] = "none"
    out = grpo_loss(
        leaves["hidden"],
        leaves["weight"],
        case.ids,
        case.advantages,
        bias=leaves.get("bias"),
        **case.tensors,
        **case.options,
        **extra,
    )
    out.loss.backward(None if upstream is None else upstream.to(out.loss.dtype))
    grads = {k: v.grad for k, v in leaves.items()}
    return Outcome(out.loss.detach(), grads, out.metrics, out)


PER_SEQUENCE = ("group_ids",)
OF_THE_VOCABULARY = ("ref_weight", "ref_bias")


def map_tokens(
    case: Case,
    per_token: Callable[[Tensor], Tensor],
    per_sequence: Callable[[Tensor], Tensor] = lambda x: x,
) -> Case:
    """The case with everything that belongs to tokens [B, T, ...] and sequences [B] changed."""

    def field(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or name in OF_THE_VOCABULARY or value.dim() == 0:
            return value
        return per_sequence(value) if name in PER_SEQUENCE else per_token(value)

    spread = case.advantages.shape == case.ids.shape
    return replace(
        case,
        hidden=per_token(case.hidden),
        ids=per_token(case.ids),
        advantages=(per_token if spread else per_sequence)(case.advantages),
        tensors={k: field(k, v) for k, v in case.tensors.items()},
        options={k: field(k, v) for k, v in case.options.items()},
    )


def map_vocabulary(case: Case, per_entry: Callable[[Tensor], Tensor]) -> Case:
    tensors = {k: per_entry(v) if k in OF_THE_VOCABULARY else v for k, v in case.tensors.items()}
    bias = None if case.bias is None else per_entry(case.bias)
    return replace(case, weight=per_entry(case.weight), bias=bias, tensors=tensors)


# ---- what must not change a loss


@dataclass
class Moved:
    """A case with the same loss; how its gradients go back; options of the call."""

    case: Case
    hidden: Callable[[Tensor], Tensor] = lambda x: x
    entries: Callable[[Tensor], Tensor] = lambda x: x
    extra: dict[str, Any] | None = None


def padded(case: Case, data: st.DataObject) -> Moved:
    """Columns that do not count, anywhere."""
    width = case.ids.shape[1]
    where = data.draw(st.lists(st.integers(0, width), min_size=1, max_size=4), label="columns at")
    source = sorted([*range(width), *(-1 - at for at in where)], key=lambda c: _place(c))
    old = [c >= 0 for c in source]

    def wider(x: Tensor) -> Tensor:
        out = x.new_zeros(x.shape[0], len(source), *x.shape[2:])
        out[:, old] = x
        return out

    case = map_tokens(case, wider)
    t = case.options.get("temperature")
    if isinstance(t, Tensor):
        case.options["temperature"] = torch.where(case.mask, t, 1.0)
    return Moved(case, hidden=lambda g: g[:, old])


def _place(column: int) -> tuple[int, int]:
    """Old columns are c >= 0; -1 - at is a new one before the old column `at`."""
    return (column, 1) if column >= 0 else (-1 - column, 0)


def packed(case: Case, data: st.DataObject) -> Moved:
    """Sequences back to back, without what does not count on their right; holes stay."""
    rows, width = case.ids.shape
    position = torch.arange(1, width + 1).expand(rows, width)
    lengths = (position * case.mask).amax(dim=1)
    keep = position <= lengths[:, None]
    shape, each = case.hidden.shape, case.advantages.shape == case.ids.shape
    case = map_tokens(case, lambda x: x[keep])
    if case.ids.numel() == rows:  # a vector could be either
        case.advantages = case.advantages[None] if each else case.advantages[:, None]
        for name in ("importance_sampling_ratio", "entropy_scale"):
            if name in case.tensors:
                case.tensors[name] = case.tensors[name][None]
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    case.tensors["cu_seqlens"] = bounds.to(data.draw(st.sampled_from([torch.int32, torch.int64])))
    return Moved(case, hidden=lambda g: g.new_zeros(shape).index_put((keep,), g))


def reordered(case: Case, data: st.DataObject) -> Moved:
    order = torch.tensor(data.draw(st.permutations(range(len(case.ids))), label="rows"))
    return Moved(
        map_tokens(case, lambda x: x[order], lambda x: x[order]),
        hidden=lambda g: g[order.argsort()],
    )


def rechunked(case: Case, data: st.DataObject) -> Moved:
    return Moved(case, extra={"chunk_bytes": data.draw(st.integers(1, 1 << 14), label="bytes")})


def renamed(case: Case, data: st.DataObject) -> Moved:
    """Another order of the vocabulary."""
    seed = data.draw(SEEDS, label="vocabulary")
    order = torch.randperm(len(case.weight), generator=torch.Generator().manual_seed(seed))
    place = order.argsort()
    moved = map_vocabulary(case, lambda x: x[order])
    return Moved(replace(moved, ids=place[case.ids]), entries=lambda g: g[place])


def shifted(case: Case, data: st.DataObject) -> Moved:
    """A constant on all logits. With a softcap it would not be one."""
    if case.options.get("softcap") is not None:
        return Moved(case)
    by = data.draw(st.floats(-50, 50), label="shift")
    bias = case.weight.new_zeros(len(case.weight)) if case.bias is None else case.bias
    tensors = dict(case.tensors)
    if "ref_weight" in tensors:
        ref_bias = tensors.get("ref_bias", bias.new_zeros(bias.shape))
        tensors["ref_bias"] = ref_bias - by
    return Moved(replace(case, bias=bias + by, tensors=tensors))


def spread(case: Case, data: st.DataObject) -> Moved:
    """Advantages of sequences as those of their tokens, by strides of 0."""
    if case.advantages.shape == case.ids.shape:
        return Moved(case)
    return Moved(replace(case, advantages=case.advantages[:, None].expand(case.ids.shape)))


def restrided(case: Case, data: st.DataObject) -> Moved:
    """Every tensor a view into a larger one that is full of NaN, or of ids out of range."""

    def inside(x: Tensor) -> Tensor:
        if x.dim() == 0:
            return x
        bad = {torch.bool: True}.get(x.dtype, torch.nan if x.is_floating_point() else 10**9)
        wide = torch.full([2 * n + 1 for n in x.shape], bad, dtype=x.dtype)
        view = wide[tuple(slice(1, None, 2) for _ in x.shape)]
        view.copy_(x)
        return view

    moved = map_vocabulary(map_tokens(case, inside, inside), inside)
    return Moved(moved)


def typed(case: Case, data: st.DataObject) -> Moved:
    """Other types of the ids and of the mask."""
    ids = case.ids.to(data.draw(st.sampled_from([torch.int32, torch.int16, torch.uint8])))
    kind = data.draw(st.sampled_from([torch.int64, torch.uint8, torch.float32, torch.bfloat16]))
    mask = case.tensors["completion_mask"].to(kind)
    return Moved(replace(case, ids=ids, tensors=case.tensors | {"completion_mask": mask}))


MOVES: dict[str, Callable[[Case, st.DataObject], Moved]] = {
    "padded": padded,
    "packed": packed,
    "reordered": reordered,
    "rechunked": rechunked,
    "renamed": renamed,
    "shifted": shifted,
    "spread": spread,
    "restrided": restrided,
    "typed": typed,
}
