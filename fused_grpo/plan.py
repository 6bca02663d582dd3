"""Where the memory of a training step goes, and the longest context that fits: `plan_memory`.

Everything is counted from shapes. The loss's part is what `memory` plans its chunks with; the
model's is what autograd saves of transformers' layers, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fused_grpo.memory import (
    DEFAULT_CHUNK_BYTES,
    FOUND_BYTES,
    GPU_CHUNK_BYTES,
    PLAIN,
    SUMMED_BYTES,
    VECTOR_BYTES,
    WAITING_BYTES,
    ChunkPlan,
    chunk_bytes_used,
    plan_chunks,
    plan_triton,
    triton_bytes_used,
    waiting_entries,
)
from fused_grpo.model_shapes import ModelShape, shape_of

GB = 10**9
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
# bytes of the optimizer's state for a parameter of `size` bytes
OPTIMIZERS: dict[str, Callable[[int], int]] = {
    "adamw": lambda size: 2 * size,
    "adamw_8bit": lambda size: 2,
    "sgd": lambda size: 0,
}
LOSSES = ("fused-grpo", "fused-grpo, routed", "TRL 1.16", "eager")
# of the device, for its context, the libraries' workspaces and what fragmentation wastes
RESERVE = 0.06
# What libraries take on a CPU beside operands: for a product (measured: 6 to 20 MB), and to sort
# the entries that routed gradients keep, per entry.
_PRODUCT_BYTES, _SORT_BYTES = 12 * 2**20, 24
_LONGEST = 2**24


@dataclass(frozen=True)
class LossMemory:
    """Bytes that a loss holds at its peak, beyond its inputs.

    Attributes:
        gradients: of hidden states and head, in their dtypes.
        sums: fp32 sums of the gradients of a 16-bit head (and, of TRL, of its hidden states); of
            routed gradients, the entries that are summed.
        logits: what it holds per token and vocabulary entry; of ours and TRL's, of a chunk.
        vectors: log-probabilities, masks and their like.
        libraries: what products and sorting allocate for themselves, on a CPU.
        chunk: tokens and vocabulary entries that our loss works on at once.
    """

    gradients: int
    sums: int
    logits: int
    vectors: int
    libraries: int = 0
    chunk: ChunkPlan | None = None

    @property
    def total(self) -> int:
        return self.gradients + self.sums + self.logits + self.vectors + self.libraries


def loss_memory(
    tokens: int,
    vocab: int,
    hidden: int,
    *,
    dtype: str = "bfloat16",
    loss: str = "fused-grpo",
    frozen_head: bool = False,
    frozen_trunk: bool = False,
    chunk_bytes: int | None = None,
    device: str = "cuda",
    kept_per_token: float = 300,
) -> LossMemory:
    """What a loss call with its backward holds at its peak, beyond its inputs.

    Args:
        tokens: N that count in the loss.
        vocab, hidden: V and H of the head.
        dtype: of hidden states and head.
        loss: one of `LOSSES`.
        frozen_head, frozen_trunk: without a gradient of the weight, or of the hidden states.
        chunk_bytes: as in `grpo_loss`; None: its default on the device.
        device: "cuda" or "cpu".
        kept_per_token: entries that routed gradients keep; the metric "route/kept_per_token". 300
            is what a model sampled at temperature 1 needs.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    _check_sizes(tokens=(tokens, 0), vocab=(vocab, 1), hidden=(hidden, 1))
    _choice("dtype", dtype, ITEMSIZE)
    _choice("loss", loss, LOSSES)
    _choice("device", device, ("cuda", "cpu"))
    if chunk_bytes is not None:
        _check_sizes(chunk_bytes=(chunk_bytes, 1))
    size = ITEMSIZE[dtype]
    states = 0 if frozen_trunk else tokens * hidden
    head = 0 if frozen_head else vocab * hidden
    wide = 4 if size < 4 else 0
    vectors = VECTOR_BYTES * tokens
    if loss == "eager":  # logits in fp32, their log-softmax, and its gradient (measured: 11.5)
        return LossMemory(size * (states + head), 0, 12 * tokens * vocab, vectors)
    if loss == "TRL 1.16":  # a tile of logits; both gradients summed in fp32
        tile = size * min(tokens, 4096) * min(vocab, 32_768)
        return LossMemory(size * (states + head), wide * (states + head), tile, vectors)
    any_grad, routed = bool(states or head), loss.endswith("routed")
    bytes_used, plan = _chunks(
        tokens, vocab, hidden, size if any_grad else 0, size, chunk_bytes, device, routed
    )
    sums = wide * head
    libraries = _PRODUCT_BYTES if device == "cpu" and tokens else 0
    if routed:
        kept = min(kept_per_token, vocab)
        entries = _kept_entries(tokens, kept, plan, head, size, chunk_bytes)
        # the entries are summed when a chunk's logits are done with
        of_chunk = min(tokens, plan.tokens) * vocab * size
        sums = max(0, entries[0], entries[1] + of_chunk - bytes_used)
        if head and device == "cpu":
            libraries += _SORT_BYTES * min(int(tokens * kept), waiting_entries(chunk_bytes))
    return LossMemory(size * (states + head), sums, bytes_used, vectors, libraries, plan)


def _kept_entries(
    tokens: int, kept: float, plan: ChunkPlan, head: int, size: int, chunk_bytes: int | None
) -> tuple[int, int]:
    """(bytes while entries of a chunk are found, bytes while the weight's gradient is formed), the
    gradient itself aside, `head` numbers. Entries wait for it in batches, which add up in fp32."""
    found = int(FOUND_BYTES * min(tokens, plan.tokens) * kept)
    if not head:
        return found, 0
    entries, most = int(tokens * kept), waiting_entries(chunk_bytes)
    if entries <= most:  # formed once, at the end
        return found + WAITING_BYTES * entries - size * head, SUMMED_BYTES * entries
    return found + WAITING_BYTES * most + (4 - size) * head, SUMMED_BYTES * most + 4 * head


def _chunks(
    tokens: int,
    vocab: int,
    hidden: int,
    stored: int,
    size: int,
    chunk_bytes: int | None,
    device: str,
    routed: bool,
) -> tuple[int, ChunkPlan]:
    """(bytes, plan) of the chunks of our loss."""
    if device == "cpu":
        extra = PLAIN._replace(groups=routed)
        plan = plan_chunks(chunk_bytes, vocab, hidden, stored, 4, extra, tokens)
        count = min(tokens, plan.tokens)
        used = chunk_bytes_used(count, plan.tile, vocab, hidden, stored, 4, extra)
        if size == 4:  # a tile of such a weight is taken as it is
            used -= 4 * plan.tile * hidden
        return (used if tokens else 0), plan
    kinds: dict[str, Any] = {"kept": stored, "operand": size, "converts": False}
    plan = plan_triton(chunk_bytes, vocab, hidden, on_gpu=True, **kinds)
    plan = plan._replace(tokens=min(plan.tokens, max(tokens, 1)))
    count = min(tokens, plan.tokens)
    return triton_bytes_used(count, plan.tile, vocab, hidden, **kinds), plan


def saved_per_token(shape: ModelShape, dtype: str, lora: bool = False) -> int:
    """Bytes that a layer of `shape` saves for its backward, per token.

    Of transformers' eager layers under fused attention, which saves a number per head instead of
    scores. With LoRA the weights are frozen, and adapters in fp32 (PEFT's default for 16-bit
    weights) take a copy of their input each.
    """
    size = ITEMSIZE[dtype]
    kept = 0 if lora else size  # of what a weight is multiplied with

    def fed(layers: int) -> int:  # the input of so many linear layers
        return 4 * layers if lora and size < 4 else size

    h, i, q, k = shape.hidden, shape.intermediate, shape.query_width, shape.key_width
    normed = 4 if shape.wide_norms and not lora else kept
    norms = (4 if shape.wide_norms else 2) * (4 + normed)
    total = h * (norms + fed(3) + fed(2)) + 8
    total += q * 2 * size + k * 2 * size + 4 * shape.heads
    if lora and size < 4:
        total += q * fed(1)
    if shape.qk_norm:
        total += (q + k) * (4 + normed) + 4 * (shape.heads + shape.kv_heads)
    copies = max(1, shape.top_k)
    total += copies * i * (3 * size + (size if shape.experts else fed(1)))
    if shape.experts:  # what is sent to the experts and comes back; the router's scores
        total += copies * 2 * size * h + 4 * shape.experts
    return total


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device.

    Attributes:
        parts: by name: weights, optimizer, gradients, activations, the loss's own.
        peaks: of the moments when most is held: "sampling" (with the cache of `generate`), "loss",
            "backward" (of the last layer).
        limit: what may be used of `gpu_memory`; None: no limit was given.
        longest: tokens of context that fit; None without a limit.
        chunk: tokens and vocabulary entries that our loss works on at once.
        chunk_bytes: the budget to give to `grpo_loss`; None: its default.
    """

    parts: dict[str, int]
    peaks: dict[str, int]
    limit: int | None
    longest: int | None
    chunk: ChunkPlan | None
    chunk_bytes: int | None

    @property
    def peak(self) -> int:
        """The largest of the peaks."""
        return max(self.peaks.values())

    @property
    def fits(self) -> bool:
        return self.limit is None or self.peak <= self.limit


@dataclass(frozen=True)
class Setting:
    """The arguments of `plan_memory`, checked."""

    shape: ModelShape
    batch: int
    dtype: str
    optimizer: str
    lora_r: int | None
    checkpointing: bool
    reference: bool
    prompt: int
    shards: int
    device: str

    def state(self) -> dict[str, int]:
        """What does not depend on the context, on one of `shards` devices."""
        size, rank = ITEMSIZE[self.dtype], self.lora_r
        weights = self.shape.parameters * size
        trained, width = self.shape.parameters, size
        if rank is not None:
            trained, width = self.shape.adapter_parameters(rank), 4
            weights += trained * width
        parts = {
            "weights": weights,
            # switching the adapter off gives the reference
            "reference model": weights if self.reference and rank is None else 0,
            "optimizer": trained * OPTIMIZERS[self.optimizer](width),
            "gradients": trained * width,
        }
        parts = {name: -(-value // self.shards) for name, value in parts.items()}
        if self.shards > 1:  # the layer that is computed, and the next, are whole
            parts["gathered layers"] = 2 * size * self.shape.layer_parameters
            parts["gathered head"] = size * self.shape.vocab * self.shape.hidden
        return parts

    def activations(self, tokens: int) -> tuple[dict[str, int], int]:
        """What stays until the backward, and what comes on top while it is in a layer."""
        size, shape = ITEMSIZE[self.dtype], self.shape
        per_token = saved_per_token(shape, self.dtype, self.lora_r is not None)
        if self.lora_r is not None:
            per_token += 4 * self.lora_r * (4 if shape.experts else 7)
        layer, states = tokens * per_token, tokens * shape.hidden
        wide = max(shape.intermediate * max(1, shape.top_k), shape.query_width)
        moving = tokens * size * 2 * wide  # gradients on their way
        last = states * (4 + 2 * size)  # the last norm, and what the head reads
        if self.checkpointing:
            checkpoints = shape.layers * states * size
            return {"checkpoints": checkpoints, "last states": last}, layer + moving
        return {"activations": shape.layers * layer, "last states": last}, moving

    def cache(self, tokens: int) -> int:
        """Keys and values of `generate`."""
        return 2 * self.shape.layers * self.shape.key_width * ITEMSIZE[self.dtype] * tokens

    def plan(self, context: int, loss: str, chunk_bytes: int | None) -> MemoryPlan:
        tokens, counted = self.batch * context, self.batch * max(0, context - self.prompt)
        of_loss = loss_memory(
            counted,
            self.shape.vocab,
            self.shape.hidden,
            dtype=self.dtype,
            loss=loss,
            frozen_head=self.lora_r is not None,
            chunk_bytes=chunk_bytes,
            device=self.device,
        )
        state, (kept, moving) = self.state(), self.activations(tokens)
        states = counted * self.shape.hidden * ITEMSIZE[self.dtype]
        # the gradient of the head is among those of the model
        loss_parts = {
            "loss: logits": of_loss.logits,
            "loss: sums of gradients": of_loss.sums,
            "loss: gradient of the states": states,
            "loss: vectors": of_loss.vectors + of_loss.libraries,
        }
        held = sum(state.values()) + sum(kept.values())
        cache = self.cache(tokens)
        peaks = {
            "sampling": sum(state.values()) - state["gradients"] + cache,
            "loss": held + sum(loss_parts.values()),
            "backward": held + moving + states + of_loss.vectors,
        }
        parts = state | kept | {"backward of a layer": moving} | loss_parts
        parts["cache of generate"] = cache
        return MemoryPlan(parts, peaks, None, None, of_loss.chunk, chunk_bytes)


def plan_memory(
    model: Any,
    context: int,
    batch: int = 1,
    gpu_memory: float | None = None,
    *,
    loss: str = "fused-grpo",
    dtype: str = "bfloat16",
    optimizer: str = "adamw",
    lora_r: int | None = None,
    checkpointing: bool = True,
    reference: bool = False,
    prompt: int = 0,
    shards: int = 1,
    device: str = "cuda",
) -> MemoryPlan:
    """Where the memory of a training step goes, and the longest context that fits.

    Args:
        model: a name as in `fused_grpo.model_shapes.SHAPES`, a transformers configuration, the path
            of a config.json or its folder, or a `ModelShape`.
        context: tokens of a sequence, prompt and completion.
        batch: sequences of a micro-batch, per device.
        gpu_memory: of the device, in GB (10^9 bytes); 6 % of it are left for its context, the
            libraries' workspaces and fragmentation. None: no limit.
        loss: one of `LOSSES`.
        dtype: of weights and activations: bfloat16, float16 or float32.
        optimizer: adamw (two states in the dtype of the parameter), adamw_8bit, sgd.
        lora_r: rank of an adapter in fp32 on all linear layers but the head; None: all weights are
            trained.
        checkpointing: of activations, layer by layer.
        reference: whether a copy of the model is held for the KL; an adapter needs none.
        prompt: tokens of the prompt, which do not count in the loss.
        shards: devices that weights, gradients and optimizer are spread over (FSDP).
        device: "cuda" or "cpu".

    Raises:
        TypeError, ValueError: naming the argument.
    """
    _choice("dtype", dtype, ITEMSIZE)
    _choice("optimizer", optimizer, OPTIMIZERS)
    _choice("loss", loss, LOSSES)
    _choice("device", device, ("cuda", "cpu"))
    _check_sizes(context=(context, 0), batch=(batch, 1), prompt=(prompt, 0), shards=(shards, 1))
    if lora_r is not None:
        _check_sizes(lora_r=(lora_r, 1))
    if gpu_memory is not None and not 0 <= gpu_memory < float("inf"):
        raise ValueError(f"gpu_memory={gpu_memory} must be a number of GB, 0 or more")
    setting = Setting(
        shape_of(model),
        batch,
        dtype,
        optimizer,
        lora_r,
        checkpointing,
        reference,
        prompt,
        shards,
        device,
    )
    limit = None if gpu_memory is None else int(gpu_memory * GB * (1 - RESERVE))
    plan = _plan(setting, context, loss, limit)
    return plan if limit is None else replace(plan, longest=_longest(setting, loss, limit))


def _plan(setting: Setting, context: int, loss: str, limit: int | None) -> MemoryPlan:
    """Of a context, with smaller chunks than the default's where only they fit."""
    plan = setting.plan(context, loss, None)
    if limit is None:
        return plan
    if plan.chunk is not None and plan.peaks["loss"] > limit:
        default = DEFAULT_CHUNK_BYTES if setting.device == "cpu" else GPU_CHUNK_BYTES
        spare = limit - plan.peaks["loss"] + plan.parts["loss: logits"]
        if default // 16 <= spare < default:  # less is slow: products of a few tokens
            plan = setting.plan(context, loss, spare)
    return replace(plan, limit=limit)


def _longest(setting: Setting, loss: str, limit: int) -> int:
    """The longest context for which `_plan` fits; 0 if none does."""

    def fits(context: int) -> bool:
        return _plan(setting, context, loss, limit).fits

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= _LONGEST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _check_sizes(**sizes: tuple[int, int]) -> None:
    for name, (value, least) in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")


def _choice(name: str, value: str, known: Any) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")
