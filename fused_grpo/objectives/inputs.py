"""Which tensors the options of a loss need, and which they would ignore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fused_grpo.objectives.spec import LossSpec


def check_tensors(spec: LossSpec, given: Mapping[str, Tensor | None]) -> None:
    """ValueError for a tensor that is needed and missing, or given and without effect."""
    here = {name for name, value in given.items() if value is not None}
    for name, needs in _needed(spec).items():
        if needs and name not in here:
            raise ValueError(f"{needs} needs {name}")
    for name, ignores in _ignored(spec, here).items():
        if ignores and name in here:
            raise ValueError(f"{name} is given, but {ignores}")
    if spec.off_policy_mask_threshold is not None and not here & {
        "old_per_token_logps",
        "sampling_per_token_logps",
    }:
        raise ValueError(
            f"off_policy_mask_threshold={spec.off_policy_mask_threshold} needs "
            "sampling_per_token_logps or old_per_token_logps"
        )


def _needed(spec: LossSpec) -> dict[str, str]:
    """tensor -> what needs it, or an empty string."""
    by_sampler = ("sampling_correction", "rejection", "veto_ratio_min", "veto_ratio_max")
    sampler = [f"{n}={getattr(spec, n)}" for n in by_sampler if getattr(spec, n) is not None]
    groups = "group_ids" in spec.scheme.needs
    return {
        "sampling_per_token_logps": sampler[0] if sampler else "",
        "group_ids": f"aggregation={spec.aggregation or spec.row.scheme!r}" if groups else "",
    }


def entropy_option(spec: LossSpec) -> str:
    """The option for which the value of the entropies has an effect."""
    if spec.entropy_coef != 0:
        return f"entropy_coef={spec.entropy_coef}"
    if spec.top_entropy_quantile < 1:
        return f"top_entropy_quantile={spec.top_entropy_quantile}"
    return f"loss_type={spec.loss_type!r}"


def _ignored(spec: LossSpec, here: set[str]) -> dict[str, str]:
    """tensor -> why it would have no effect, or an empty string."""
    old = ""
    if spec.bypass:
        old = "sampling_correction='bypass' puts the sampler's log-probs in its place"
    elif not spec.uses_old:
        old = f"loss_type={spec.loss_type!r} would ignore it"
    elif not _old_matters(spec, here):
        old = "the sampler's log-probs come before it in off_policy_mask_threshold"
    by_sampler = spec.needs_sampler or spec.off_policy_mask_threshold is not None
    weighs = spec.sampling_correction not in (None, "monitor", "bypass")
    scheme_options = ("aggregation", "num_items_in_batch", "num_sequences", "max_completion_length")
    set_options = [n for n in scheme_options if getattr(spec, n) is not None]
    grouped = "group_ids" in spec.scheme.takes
    return {
        "old_per_token_logps": old,
        "sampling_per_token_logps": ""
        if by_sampler
        else "nothing uses it: set sampling_correction ('monitor' only logs)",
        "importance_sampling_ratio": f"sampling_correction={spec.sampling_correction!r} computes it"
        if weighs
        else "",
        "token_weights": f"{set_options[0]} would be ignored" if set_options else "",
        "entropy_scale": "" if spec.entropy_coef != 0 else "entropy_coef=0 would ignore it",
        "group_ids": "" if grouped else "only aggregation='group_mean' uses it",
    }


def _old_matters(spec: LossSpec, here: set[str]) -> bool:
    """Whether anything but a mask that prefers the sampler's log-probs reads the old ones."""
    others = spec.row.uses_old or spec.use_bias_correction_kl or spec.needs_sampler
    return others or "sampling_per_token_logps" not in here


def check_reference(spec: LossSpec, given: Mapping[str, object]) -> None:
    """ValueError where what is given of the reference does not fit together, or to the KL.

    `given`: ref_per_token_logps and the options of a reference head, those that are set.
    """
    names = ", ".join(given)
    if spec.beta == 0:
        if given:
            raise ValueError(f"{names} is given, but beta=0 would ignore it: set beta > 0")
        return
    head = [name for name in given if name != "ref_per_token_logps"]
    if head and ("ref_hidden" not in head or "ref_weight" not in head):
        raise ValueError(f"{names}: a reference head needs both ref_hidden and ref_weight")
    if spec.head_kl and not head:
        raise ValueError(
            f"kl_estimator={spec.kl_estimator!r} needs ref_hidden and ref_weight: one "
            "log-probability per token does not tell a divergence over the vocabulary"
        )
    if not given:
        raise ValueError(
            f"beta={spec.beta} needs ref_per_token_logps, or ref_hidden and ref_weight"
        )
    if len(head) < len(given) and head:
        raise ValueError(
            "ref_per_token_logps and ref_hidden are both given: the log-probabilities are either "
            "known or computed"
        )


def check_groups(
    vocab: object,
    sequences: object,
    backend: str,
    support: Mapping[str, object] | None = None,
    reference: Mapping[str, object] | None = None,
    spec: LossSpec | None = None,
    routing: Mapping[str, object] | None = None,
    apart: Sequence[object] = (),
) -> None:
    """ValueError where a call with a shared vocabulary, or shared sequences, cannot be honoured.

    `apart`: an adapter on the head, and other outputs, which know of whole vocabularies only.
    """
    name = "process_group" if vocab is not None else "sequence_group"
    if vocab is None and sequences is None:
        return
    if backend == "reference":
        raise ValueError(f"{name} is given, which backend='reference' does not know: use 'chunked'")
    if (routing or {}).get("backward", "exact") != "exact":
        raise ValueError(f"{name} is given, which backward='routed' does not know yet: use 'exact'")
    adapter, *outputs = apart or (None,)
    if vocab is not None and (adapter is not None or any(outputs)):
        other = "lora_weight" if adapter is not None else "outputs"
        raise ValueError(f"{other} does not go with process_group: give the whole head")
    for other in (*(support or ()), *(reference or ())):
        if vocab is not None:
            hint = "; ref_per_token_logps may come from linear_logprobs with the same process_group"
            raise ValueError(
                f"{other} does not go with process_group: it is about the whole vocabulary, of "
                f"which a rank has a part{hint if other.startswith('ref_') else ''}"
            )
    if sequences is None or spec is None:
        return
    by_loss = f"loss_type={spec.loss_type!r}" if spec.row.locality == "batch" else ""
    by_option = f"top_entropy_quantile={spec.top_entropy_quantile}"
    if by_loss or spec.top_entropy_quantile < 1:
        raise ValueError(
            f"{by_loss or by_option} looks at all tokens of a call, which sequence_group spreads "
            "over ranks: only reductions over sequences go over them"
        )
