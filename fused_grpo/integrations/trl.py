"""TRL 1.16: its head by ours, and its GRPO trainer on the fused loss.

`patch()` replaces the function behind `trl.trainer.utils.add_fused_lm_head`, which every trainer
of TRL calls for its log-probabilities, and changes nothing else. `FusedGRPOTrainer` is TRL's
`GRPOTrainer` with loss and gradients formed in one pass over the head.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import trl
from torch import Tensor
from trl import GRPOTrainer

from fused_grpo.integrations import trl_options
from fused_grpo.integrations.patching import Patch, Replacement, holders
from fused_grpo.loss import GRPOLossOutput, grpo_loss, linear_logprobs
from fused_grpo.objectives import LossSpec
from fused_grpo.statistics import STATISTICS

VERSIONS = "1.16."  # what is replaced was compared with these releases
_SIGNATURE = (
    *("ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size"),
    *("final_logit_softcapping", "logit_scale", "outputs"),
)

# log-probabilities, entropy, log_sum_sq_probs, mean_logits, is_top1, each [n] or None
HeadOutputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class HeadFunction:
    """In the place of TRL's `ChunkedLogProbFunction`: `apply` has its arguments and results.

    Two differences, both by intent: logits are fp32 from fp32 accumulators, autocast or not, where
    TRL rounds them to the dtype of the hidden states; and `chunk_size` is ignored, as chunks have a
    size in bytes. A softcap of 0 raises, where TRL divides by 1 instead.
    """

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ) -> HeadOutputs:
        """hidden [n, H], weight [V, H], bias [V], targets [n] -> fp32 values [n]."""
        if hasattr(weight, "ds_id"):
            raise ValueError(
                "the head is a parameter that DeepSpeed ZeRO-3 has partitioned; use ZeRO-2, or "
                "TRL's own head"
            )
        head: dict[str, Any] = {
            "bias": bias,
            "temperature": temperature,
            "softcap": final_logit_softcapping,
            "logit_scale": logit_scale,
        }
        pending = _PENDING.get()
        if pending is not None:
            return pending.apply(hidden, weight, targets, head)
        wanted = tuple(name for name in STATISTICS if name in outputs)
        out = linear_logprobs(
            hidden, weight, targets, entropy="entropy" in outputs, outputs=wanted, **head
        )
        return out.logps, out.entropy, out.log_sum_sq_probs, out.mean_logits, out.is_top1


def check_version() -> None:
    """RuntimeError if the installed TRL is not one that this module was compared with."""
    if not trl.__version__.startswith(VERSIONS):
        raise RuntimeError(
            f"trl {trl.__version__} is not supported: what is replaced was compared with trl "
            f"{VERSIONS}x only"
        )


def _replacements() -> list[Replacement]:
    check_version()
    original = importlib.import_module("trl.kernels").ChunkedLogProbFunction
    found = tuple(inspect.signature(original.forward).parameters)
    if found != _SIGNATURE:
        raise RuntimeError(
            f"trl {trl.__version__}: ChunkedLogProbFunction.forward takes {', '.join(found)}, not "
            f"{', '.join(_SIGNATURE)}"
        )
    utils = importlib.import_module("trl.trainer.utils")
    for_kernels = utils._use_triton

    def leaves_out_masked(device: torch.device) -> bool:
        # in trl.trainer.utils this only says whether masked positions are left out
        return device.type == "cpu" or for_kernels(device)

    everywhere = [(*place, HeadFunction) for place in holders(("trl",), original)]
    return [*everywhere, (utils, "_use_triton", leaves_out_masked)]


_PATCH = Patch("trl", _replacements)


def patch() -> Patch:
    """Replaces TRL's chunked log-prob function with ours, in models prepared already as well.

    `with patch(): ...` undoes it on the way out, `unpatch()` at any time.

    Raises:
        RuntimeError: another version of TRL than 1.16, or patched already.
    """
    return _PATCH.apply()


def unpatch() -> None:
    """Puts TRL's own function back. RuntimeError: it is not patched."""
    _PATCH.undo()


@contextlib.contextmanager
def _our_head() -> Iterator[None]:
    if _PATCH.applied:
        yield
        return
    with patch():
        yield


class _Pending:
    """A loss that waits for the hidden states which TRL's forward brings to the head."""

    def __init__(self, run: Callable[..., GRPOLossOutput]) -> None:
        self._run = run
        self.out: GRPOLossOutput | None = None

    def apply(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, head: dict[str, Any]
    ) -> HeadOutputs:
        if self.out is not None:
            raise RuntimeError("the model was run twice for one loss")
        out = self.out = self._run(hidden, weight, targets, **head)
        assert out.entropy is not None
        # through the model's outputs, so that the hooks of DDP and FSDP see it
        return _Carry.apply(out.per_token_logps, out.loss), out.entropy, None, None, None


_PENDING: ContextVar[_Pending | None] = ContextVar("pending", default=None)


class _Carry(torch.autograd.Function):
    """(values [n], loss []) -> values; what comes back to any of them goes to the loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return values.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor]:
        return None, upstream.sum(dtype=ctx.dtype)


class _Uncarry(torch.autograd.Function):
    """Values of `_Carry` -> a 0 with the gradient of the loss; `counted` says where they are."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, counted: Tensor) -> Tensor:
        ctx.save_for_backward(counted)
        ctx.dtype = values.dtype
        return torch.zeros((), dtype=values.dtype, device=values.device)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (counted,) = ctx.saved_tensors
        # all of it to one token: shares would not add up to 1 exactly, and cost a copy of dW
        first = counted & (counted.flatten().cumsum(0) == 1).view(counted.shape)
        return first.to(ctx.dtype) * upstream, None


class FusedGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer`, with loss and gradients formed in one pass over the head.

    The same arguments, the same numbers (but for logits that are never rounded to bf16), the same
    metrics: these come from TRL's own code, which is given the log-probabilities and entropies of
    the fused pass. `GRPOConfig` options of the loss go to `grpo_loss`, see `trl_options`.

    Args:
        fused_options: of `grpo_loss`, for how it is computed: `backend`, `chunk_bytes`,
            `backward` and its `route_...` options.

    Attributes:
        fused_loss: 0-d, the loss of the last micro-batch as `grpo_loss` computed it, without the
            experts' auxiliary loss; detached.

    Raises:
        RuntimeError: another version of TRL than 1.16.
        ValueError: options that `grpo_loss` cannot honour.
    """

    def __init__(
        self, *args: Any, fused_options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        check_version()
        self.fused_options = trl_options.check_fused_options(fused_options or {})
        super().__init__(*args, **kwargs)
        trl_options.check(self)
        LossSpec(**trl_options.loss_options(self))

    def _get_per_token_logps_and_entropies(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        with _our_head():
            logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if _PENDING.get() is None:
            return logps, entropies, aux_loss
        self._carried = logps
        return logps.detach(), entropies, aux_loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        counted = inputs["completion_mask"].bool()
        options, tensors = trl_options.of_batch(self, inputs)
        lengths = counted.sum(1)

        def run(hidden: Tensor, weight: Tensor, targets: Tensor, **head: Any) -> GRPOLossOutput:
            # the tokens of all completions, one after the other
            per_token: dict[str, Any] = {
                name: x[counted] if x.shape == counted.shape else x.reshape(-1, 1)
                for name, x in tensors.items()
            }
            for name in ("importance_sampling_ratio", "entropy_scale"):
                x = per_token.get(name)
                if x is not None and x.dim() == 1:  # of as many sequences as tokens, too
                    per_token[name] = x[None]
            if "entropy_scale" in tensors and self.top_entropy_quantile < 1:
                scale = self._share_of_acting(hidden, weight, targets, per_token, head)
                per_token["entropy_scale"] = per_token["entropy_scale"] * scale
            out = grpo_loss(
                hidden,
                weight,
                targets,
                cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
                entropy=True,
                **per_token,
                **head,
                **options,
                **self.fused_options,
            )
            # TRL multiplies what stands at masked tokens by 0, so it must not overflow
            old = per_token.get("old_per_token_logps")
            if old is not None:
                ours = out.per_token_logps
                out.per_token_logps = torch.where(per_token["completion_mask"], ours, old.to(ours))
            return out

        pending = _Pending(run)
        token = _PENDING.set(pending)
        try:  # TRL's loss of constants: its value, its metrics, and the experts' auxiliary loss
            loss: Tensor = super()._compute_loss(model, inputs)
            assert pending.out is not None
            self.fused_loss = pending.out.loss.detach()
            return loss + _Uncarry.apply(self._carried, counted)
        finally:
            _PENDING.reset(token)
            self._carried = None

    @torch.no_grad()
    def _share_of_acting(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        per_token: dict[str, Any],
        head: dict[str, Any],
    ) -> Tensor:
        """Counted tokens by those that the entropy quantile leaves: the bonus is a mean over these,
        and their number is known after a pass of its own."""
        mask = per_token["completion_mask"]
        entropy = linear_logprobs(hidden, weight, targets, entropy=True, **head).entropy
        acting = self.get_high_entropy_mask(entropy, mask, 1 - self.top_entropy_quantile)
        return mask.sum().clamp(min=1.0) / acting.sum().clamp(min=1.0)
