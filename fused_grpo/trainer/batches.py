"""The micro-batches of a generation, and the losses and log-probabilities of one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fused_grpo.integrations.models import LanguageModelHead, causal_lm
from fused_grpo.loss import GRPOLossOutput, grpo_loss, linear_logprobs
from fused_grpo.sampler_support import linear_support
from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.packing import Packing, packed_inputs
from fused_grpo.trainer.rollout import Sample, positions

IGNORE_INDEX = -100


@dataclass
class MicroBatch:
    """Rows of a generation, trimmed to their longest prompt [P] and completion [T].

    Attributes:
        input_ids, attention_mask: [B, P + T - 1]: nothing is predicted from the last token.
        completion_ids, completion_mask: [B, T], the mask true where a token counts in the loss.
        advantages: [B].
        sequence_ids: [B] which rows of the process's generation these are.
        num_items, num_rows, num_nonempty: counted tokens, rows, and rows with counted tokens of the
            optimizer step, per process.
        old_logps, ref_logps: [B, T], or None where they are not needed.
        sampling_logps: [B, T] as the sampler computed them, or None.
        reference: hidden states [B, T, H] and head of the reference, where the loss needs them.
        support_ids: [B, T, K] what the sampler kept, where the policy has moved since.
        routed_experts: [B, P + T - 1, layers, K] what the policy's forwards go through, or None.
        packed: the model and the loss are given the tokens alone, in one row. The tensors above
            stay padded but for the hidden states, [1, n, H] of the n counted tokens.
    """

    input_ids: Tensor
    attention_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    advantages: Tensor
    sequence_ids: Tensor
    num_items: Tensor | None = None
    num_rows: Tensor | None = None
    num_nonempty: Tensor | None = None
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    sampling_logps: Tensor | None = None
    reference: tuple[Tensor, LanguageModelHead] | None = None
    support_ids: Tensor | None = None
    routed_experts: Tensor | None = None
    packed: bool = False

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def packing(self) -> Packing | None:
        """Between rows and what the loss is given, if that is something else."""
        if not self.packed:
            return None
        return Packing.of(self.attention_mask, self.completion_mask)

    def predicting(self, hidden: Tensor) -> Tensor:
        """[B, T, H] of [B, P + T - 1, H]: the states that predict the completion's tokens.

        Packed: [1, n, H] of [1, N, H], those of the counted tokens.
        """
        if (packing := self.packing) is not None:
            return packing.states(hidden)
        return hidden[:, -self.completion_ids.shape[1] :]

    def for_loss(self, values: Any) -> Any:
        """What a loss is given of [B, T, ...]: the same, or packed [1, n, ...]; None stays None."""
        packing = self.packing
        return values if packing is None or values is None else packing.flat(values)

    def in_rows(self, values: Any, fill: float = 0) -> Any:
        """[B, T, ...] of what a loss returns; packed, with `fill` where a token does not count."""
        packing = self.packing
        return values if packing is None or values is None else packing.rows(values, fill)

    def support(self, args: GRPOConfig) -> dict[str, Any]:
        """The sampler's support: its ids, or the rules, while the policy is still the sampler."""
        if self.support_ids is not None:
            return {"support_ids": self.for_loss(self.support_ids)}
        return {f"support_{name}": value for name, value in args.sampler_support.items()}

    @property
    def experts(self) -> Tensor | None:
        """`routed_experts` laid out as what the model is given, [1, N, layers, K] where packed."""
        if self.routed_experts is None or not self.packed:
            return self.routed_experts
        return self.routed_experts[self.attention_mask][None]

    def keep_experts(self, chosen: Tensor) -> None:
        """Takes what is laid out as `experts` is."""
        self.routed_experts = chosen
        if self.packed:
            rows = chosen.new_zeros(*self.attention_mask.shape, *chosen.shape[2:])
            rows[self.attention_mask] = chosen[0]
            self.routed_experts = rows

    def reference_head(self) -> dict[str, Any]:
        if self.reference is None:
            return {}
        hidden, head = self.reference
        own = {f"ref_{name}": value for name, value in head.options.items()}
        return {"ref_hidden": hidden, "ref_weight": head.weight} | own

    def model_inputs(self, model: nn.Module) -> dict[str, Tensor]:
        """Keywords for the model's forward; positions count from the first token of the prompt."""
        if self.packed:
            return packed_inputs(self.input_ids, self.attention_mask, model)
        inputs = {"input_ids": self.input_ids, "attention_mask": self.attention_mask.long()}
        backbone: Any = causal_lm(model).base_model
        if "position_ids" in inspect.signature(backbone.forward).parameters:
            inputs["position_ids"] = positions(self.attention_mask)
        return inputs


def split(
    sample: Sample, counted: Tensor, advantages: Tensor, size: int, packed: bool = False
) -> list[MicroBatch]:
    """Micro-batches of `size` rows. `counted` [B, T] is true where a token counts in the loss."""
    return [
        replace(
            _micro_batch(sample, counted, advantages, slice(start, start + size)), packed=packed
        )
        for start in range(0, len(advantages), size)
    ]


def _micro_batch(sample: Sample, counted: Tensor, advantages: Tensor, rows: slice) -> MicroBatch:
    width = int(sample.prompt_mask[rows].sum(1).max())
    length = int(sample.completion_mask[rows].sum(1).max())
    prompt_ids, prompt_mask = sample.prompt_ids[rows, -width:], sample.prompt_mask[rows, -width:]
    completion_ids = sample.completion_ids[rows, :length]
    completion_mask = sample.completion_mask[rows, :length]
    return MicroBatch(
        input_ids=torch.cat([prompt_ids, completion_ids], 1)[:, :-1],
        attention_mask=torch.cat([prompt_mask, completion_mask], 1)[:, :-1],
        completion_ids=completion_ids,
        completion_mask=counted[rows, :length],
        advantages=advantages[rows],
        sequence_ids=torch.arange(len(advantages), device=advantages.device)[rows],
        sampling_logps=None
        if sample.sampling_logps is None
        else sample.sampling_logps[rows, :length],
        routed_experts=None
        if sample.routed_experts is None
        else sample.routed_experts[rows, sample.prompt_ids.shape[1] - width :][
            :, : width + length - 1
        ],
    )


def grouped(prompts: Sequence[Any]) -> tuple[list[Any], int]:
    """(prompts, copies) such that each of the prompts repeated `copies` times gives the argument.

    A process whose share cuts through a group gets ([every row], 1).
    """
    runs = [i for i, prompt in enumerate(prompts) if i == 0 or prompt != prompts[i - 1]]
    lengths = {b - a for a, b in zip(runs, [*runs[1:], len(prompts)], strict=True)}
    copies = lengths.pop() if len(lengths) == 1 else 1
    return list(prompts[::copies]), copies


def loss_of(
    batch: MicroBatch, args: GRPOConfig, step: int = 0, **coefficients: float
) -> Callable[[Tensor, LanguageModelHead], GRPOLossOutput]:
    """A `head_fn`: the share of `batch` in the loss of its optimizer step.

    The micro-batches of a step add up to the loss of one batch with all their rows, for every
    reduction but bnpo's, which is defined by the tokens of a micro-batch. `coefficients` replace
    those of `args`; `step` is that of the optimizer.
    """
    options, spec = args.loss_options | coefficients, args.loss_spec
    options |= args.route_options(step)
    if "backward" in options:
        # numbers of their own for every process's rows
        options["sequence_ids"] = batch.sequence_ids * args.world_size + args.process_index
    sums, share = _step_sums(batch, args)

    def head_fn(hidden: Tensor, head: LanguageModelHead) -> GRPOLossOutput:
        states = batch.predicting(hidden)
        out = grpo_loss(
            states,
            head.weight,
            batch.for_loss(batch.completion_ids),
            batch.advantages[:, None],  # one per sequence, also of as many tokens as sequences
            completion_mask=batch.for_loss(batch.completion_mask),
            old_per_token_logps=batch.for_loss(batch.old_logps if spec.uses_old else None),
            ref_per_token_logps=batch.for_loss(batch.ref_logps),
            sampling_per_token_logps=batch.for_loss(
                batch.sampling_logps if spec.needs_sampler else None
            ),
            cu_seqlens=None if batch.packing is None else batch.packing.cu_seqlens,
            entropy=True,
            temperature=args.temperature,
            **batch.reference_head(),
            **batch.support(args),
            **head.arguments(states),
            **args.head_options,
            **options,
            **sums,
        )
        for name in ("per_token_loss", "per_token_logps", "entropy"):
            setattr(out, name, batch.in_rows(getattr(out, name)))
        if not (isinstance(share, float) and share == 1):
            out.loss = out.loss * share
        if head.aux_loss is not None:  # of the micro-batch, whatever the reduction of the loss
            out.loss = out.loss + head.aux_loss / args.gradient_accumulation_steps
            out.metrics["aux_loss"] = head.aux_loss.detach()
        return out

    return head_fn


def _step_sums(batch: MicroBatch, args: GRPOConfig) -> tuple[dict[str, Any], float | Tensor]:
    """What the reduction divides by in a whole step, and the factor where it is the caller's."""
    scheme = args.scheme
    if "num_items_in_batch" in scheme.takes:
        return {"num_items_in_batch": batch.num_items}, 1.0
    if "num_sequences" in scheme.takes:
        rows = batch.num_nonempty if scheme.over == "nonempty" else batch.num_rows
        return {"num_sequences": rows}, 1.0
    if "group_ids" in scheme.takes:
        groups = torch.arange(len(batch), device=batch.completion_ids.device)
        assert batch.num_rows is not None
        share = len(batch) / batch.num_rows.clamp_min(1)  # with rows that are not trained on, > 1
        return {"group_ids": groups // args.num_generations}, share
    if scheme.over == "nothing":  # a sum, of which DDP takes the mean over processes
        return {}, float(args.world_size)
    return {}, 1 / args.gradient_accumulation_steps


def logps_of(batch: MicroBatch, args: GRPOConfig) -> Callable[[Tensor, LanguageModelHead], Tensor]:
    """A `head_fn`: [B, T] log-probabilities of the completions, 0 where they do not count."""
    targets = batch.completion_ids.masked_fill(~batch.completion_mask, IGNORE_INDEX)

    def head_fn(hidden: Tensor, head: LanguageModelHead) -> Tensor:
        states = batch.predicting(hidden)
        logps = linear_logprobs(
            states,
            head.weight,
            batch.for_loss(targets),
            temperature=args.temperature,
            ignore_index=IGNORE_INDEX,
            **batch.support(args),
            **head.arguments(states),
            **args.head_options,
        ).logps
        return batch.in_rows(logps)

    return head_fn


def support_of(
    batch: MicroBatch, args: GRPOConfig
) -> Callable[[Tensor, LanguageModelHead], Tensor]:
    """A `head_fn`: [B, T, K] the ids that the sampler kept, -1 where a token does not count."""

    def head_fn(hidden: Tensor, head: LanguageModelHead) -> Tensor:
        states = batch.predicting(hidden)
        ids = linear_support(
            states,
            head.weight,
            mask=batch.for_loss(batch.completion_mask),
            temperature=args.temperature,
            **args.sampler_support,
            **head.arguments(states),
            **args.head_options,
        )
        return batch.in_rows(ids, fill=-1)

    return head_fn


def states_of(
    batch: MicroBatch,
) -> Callable[[Tensor, LanguageModelHead], tuple[Tensor, LanguageModelHead]]:
    """A `head_fn`: the states [B, T, H] that predict the completion, and their head."""
    return lambda hidden, head: (batch.predicting(hidden), head)
