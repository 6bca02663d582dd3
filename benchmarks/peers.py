"""Adapters of other packages, each with the reason why it cannot run here, if there is one."""

from __future__ import annotations

import importlib.util
import inspect
import os
import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.implementations import Feed, Implementation, Run

if TYPE_CHECKING:
    from benchmarks.data import Spec


def needs(
    package: str, gpu: bool = False, hopper: bool = False, half: bool = False
) -> Callable[[Spec], str | None]:
    """Why a package cannot be used: no GPU, the wrong one, the wrong dtype, not installed."""

    def missing(spec: Spec) -> str | None:
        if gpu and spec.device != "cuda":
            return "its kernels need a GPU"
        if hopper and torch.cuda.get_device_capability()[0] != 9:
            return "its kernels need a Hopper GPU"
        if half and spec.dtype == "fp32":
            return "its kernels take 16-bit inputs only"
        if package == "verl" and verl_folder() is None:
            return "verl is neither installed nor under VERL_PATH"
        if package != "verl" and find_spec(package) is None:
            return f"{package} is not installed"
        return None

    return missing


# --- TRL 1.16 ------------------------------------------------------------------------------------


def trl_chunked(feed: Feed) -> Tensor:
    """TRL's fused head, with its trainer's arguments; on a CPU its trainer feeds it padding too."""
    from trl.kernels import ChunkedLogProbFunction

    hidden, weight = feed.hidden.flatten(0, -2), feed.weight
    logps, *_ = ChunkedLogProbFunction.apply(
        hidden, weight, None, feed.ids.flatten(), feed.case.temperature, 32768, None, 1.0, ()
    )
    return logps.view(feed.ids.shape)


# --- Liger 0.8.5 ---------------------------------------------------------------------------------


@cache
def _liger_module(compiled: bool, beta: float, case_key: tuple[Any, ...]) -> torch.nn.Module:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # type: ignore

    epsilon, loss_type, temperature = case_key
    return LigerFusedLinearGRPOLoss(
        beta=beta,
        use_ref_model=beta != 0,
        compiled=compiled,
        epsilon_low=epsilon,
        epsilon_high=epsilon,
        loss_type=loss_type,
        temperature=temperature,
    )


def liger(compiled: bool) -> Run:
    """Its chunked loss, which takes the padded batch only."""

    def run(feed: Feed) -> tuple[Tensor, Tensor | None]:
        case = feed.case
        key = (case.epsilon, case.loss_type, case.temperature)
        loss, _ = _liger_module(compiled, case.beta, key)(
            feed.hidden,
            feed.weight,
            feed.ids,
            case.mask.to(feed.old.dtype),
            case.advantages,
            old_per_token_logps=feed.old,
            ref_per_token_logps=feed.ref if case.beta else None,
        )
        loss.backward()
        return loss.detach(), None

    return run


def liger_logprobs(feed: Feed) -> Tensor:
    """The log-probabilities inside Liger's loss, on their own: it returns none itself."""
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase  # type: ignore

    hidden = feed.hidden if feed.hidden.dim() == 3 else feed.hidden[None]
    ids = feed.ids.view(hidden.shape[:-1])
    logps = LigerFusedLinearPPOBase.chunk_forward(
        hidden, feed.weight, ids, temperature=feed.case.temperature
    )
    return logps.view(feed.ids.shape)


def liger_triton(feed: Feed) -> tuple[Tensor, Tensor | None]:
    """Its Triton loss on full logits, which wants one more position than there are tokens."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss  # type: ignore

    case = feed.case
    z = torch.nn.functional.pad(feed.hidden @ feed.weight.T, (0, 0, 0, 1))
    loss, _ = triton_grpo_loss(
        z,
        feed.old,
        feed.ref if case.beta else None,
        feed.ids,
        case.advantages,
        completion_mask=case.mask,
        temperature=case.temperature,
        beta=case.beta,
        eps_low=case.epsilon,
        eps_high=case.epsilon,
        loss_type=case.loss_type,
        reduce=True,
    )
    loss.backward()
    return loss.detach(), None


# --- verl 0.9.1 ----------------------------------------------------------------------------------


def verl_folder() -> Path | None:
    """verl's sources, under VERL_PATH (filled by pip install --no-deps --target) or installed."""
    path = Path(os.environ.get("VERL_PATH", "/nonexistent")) / "verl"
    if path.exists():
        return path
    spec = find_spec("verl")
    return Path(spec.origin).parent if spec and spec.origin else None


@cache
def _verl_functional() -> ModuleType:
    """Its torch head, without what importing verl itself asks for (ray and more)."""
    path = (verl_folder() or Path()) / "utils/experimental/torch_functional.py"
    spec = importlib.util.spec_from_file_location("verl_torch_functional", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verl_torch(feed: Feed) -> Tensor:
    """Its default: chunks of 512 tokens, the entropy always with them."""
    head = _verl_functional().FusedLinearForPPO()
    return head(feed.hidden, feed.weight, feed.ids, feed.case.temperature)[0]


def verl_triton(feed: Feed) -> Tensor:
    """Its Triton kernel; the arguments differ between releases."""
    from verl.utils.kernel.linear_cross_entropy import LinearCrossEntropy  # type: ignore

    known = {
        "temperature": feed.case.temperature,
        "reduction": "none",
        "dist_process_group": None,
    }
    names = list(inspect.signature(LinearCrossEntropy.forward).parameters)[4:]
    rest = [known[name] for name in names]
    logps, _ = LinearCrossEntropy.apply(feed.hidden, feed.weight, feed.ids, *rest)
    return logps


# --- heads for cross entropy ---------------------------------------------------------------------


def cut_cross_entropy(feed: Feed) -> Tensor:
    """With its default filter, which leaves out small gradients."""
    from cut_cross_entropy import linear_cross_entropy  # type: ignore

    x = feed.hidden if feed.case.temperature == 1.0 else feed.hidden / feed.case.temperature
    return -linear_cross_entropy(x, feed.weight, feed.ids, reduction="none").float()


def quack(feed: Feed) -> Tensor:
    """Its cross entropy on full logits: its fused heads have no coefficient per token."""
    from quack.cross_entropy import cross_entropy  # type: ignore

    z = feed.hidden @ feed.weight.T
    z = z if feed.case.temperature == 1.0 else z / feed.case.temperature
    return -cross_entropy(z, feed.ids, reduction="none").float()


_liger = partial(needs, "liger_kernel")
PEERS = (
    Implementation("TRL chunked", "padded", trl_chunked, full=True, missing=needs("trl")),
    Implementation("TRL chunked", "counted", trl_chunked, missing=needs("trl")),
    Implementation("Liger", "padded", liger_logprobs, liger(compiled=False), missing=_liger()),
    Implementation(
        "Liger, compiled",
        "padded",
        liger_logprobs,
        liger(compiled=True),
        compiled=True,
        full=True,
        missing=_liger(),
    ),
    Implementation(
        "Liger log-probs",
        "counted",
        liger_logprobs,
        extra=True,
        full=True,
        missing=_liger(),
        note="the log-probabilities of its loss, and the plain loss",
    ),
    Implementation(
        "Liger Triton",
        "padded",
        liger_logprobs,
        liger_triton,
        bytes_per_logit=8.0,
        missing=_liger(gpu=True),
        note="on full logits",
    ),
    Implementation("verl torch", "counted", verl_torch, missing=needs("verl")),
    Implementation("verl Triton", "counted", verl_triton, missing=needs("verl", gpu=True)),
    Implementation(
        "cut-cross-entropy",
        "counted",
        cut_cross_entropy,
        missing=needs("cut_cross_entropy", gpu=True, half=True),
    ),
    Implementation(
        "quack",
        "counted",
        quack,
        bytes_per_logit=8.0,
        missing=needs("quack", gpu=True, hopper=True),
        note="cross entropy on full logits",
    ),
)


def silence_known_warnings() -> None:
    # Liger's compiled loss and torch's options object warn once per call about their own internals.
    warnings.filterwarnings("ignore", module=r"torch\._dynamo.*|liger_kernel.*|trl.*")
