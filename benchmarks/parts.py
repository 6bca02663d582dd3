"""What the report measures: a table of parts, each a list of cases that are measured one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks import compare, routing, scaling
from benchmarks.compare import Settings, with_dtypes
from benchmarks.data import MODELS, Spec
from benchmarks.implementations import OURS, ROUTED

Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One case: its key, how to measure it, and how to take its memory afterwards."""

    key: str
    measure: Callable[[], Result]
    memory: Callable[[Result], None] | None = None


@dataclass(frozen=True)
class Choice:
    """What was asked for on the command line."""

    settings: Settings
    device: str = "cpu"
    memory: str = "all"

    @property
    def full(self) -> bool:
        return self.settings.full


def _job(
    choice: Choice, spec: Spec, keys: tuple[str, ...] = (), rounds: int = 99, memory: bool = True
) -> Job:
    """`rounds`: at most; on a GPU rounds are cheap."""
    settings = choice.settings
    if choice.device == "cpu":
        settings = replace(settings, rounds=min(rounds, settings.rounds))
    wanted = memory and choice.memory != "none"
    peaks = partial(compare.peaks, whose=choice.memory) if wanted else None
    return Job(spec.key, partial(compare.run, spec, settings, keys), peaks)


TINY = Spec(tokens=48, vocab=257, width=32, padding=0.27)


def loss(choice: Choice) -> Iterator[Job]:
    """Loss and both gradients on real tokens; with --full also cooler ones and a larger head."""
    real = Spec(source="real", device=choice.device)
    larger = Spec(tokens=512, vocab=151_936, width=1024, padding=0.27, device=choice.device)
    specs = [real, *([replace(real, temperature=0.6), larger] if choice.full else [])]
    for spec in [replace(TINY, device=choice.device)] if choice.settings.quick else specs:
        for each in with_dtypes(spec, "bf16", "fp32"):
            yield _job(choice, each)


def tasks(choice: Choice) -> Iterator[Job]:
    """The tasks beside the loss: log-probabilities without gradients, and a frozen head."""
    base = TINY if choice.settings.quick else Spec(source="real")
    for dtype in ("bf16", "fp32") if choice.full else ("bf16",):
        for task in ("logprobs", "frozen"):
            spec = replace(base, dtype=dtype, task=task, device=choice.device)
            yield _job(choice, spec, rounds=3, memory=choice.full)


# axis -> values by default, and those that --full adds
AXES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "tokens": ((1024, 2048), (4096, 8192, 16_384, 32_768, 65_536, 131_072)),
    "vocab": ((32_768, 65_536), (131_072, 262_144)),
    "width": ((576, 1024), (2048, 4096, 8192)),
    "padding": ((0.0, 0.3, 0.7), (0.5,)),
    "zero": ((0.0, 0.5), (0.25, 0.75)),
    "entropy": ((0.3, 2.4, 5.0), (1.0,)),
}
# fed the padded batch where its users do; the memory of the sweeps is a matter of --full
SWEPT = (f"{OURS}/padded", f"{ROUTED}/padded", "eager/padded", "eager/counted")
SWEPT += ("TRL chunked/counted", "torch linear_cross_entropy/counted")


def sweeps(choice: Choice) -> Iterator[Job]:
    """One axis at a time around a default case."""
    base = Spec(device=choice.device)
    if choice.device == "cuda":
        base = replace(base, tokens=8192, vocab=131_072, width=4096)
    specs = {}
    for axis, (usual, more) in AXES.items():
        for value in usual + more * choice.full:
            spec = replace(base, **{axis: value})
            specs[spec.key] = spec
    if choice.settings.quick:
        specs = {s.key: s for s in (TINY, replace(TINY, padding=0.0))}
    for spec in specs.values():
        yield _job(choice, spec, SWEPT, rounds=3, memory=choice.full)


def scale(choice: Choice) -> Iterator[Job]:
    """Time per token and extra memory from 4k to 128k tokens."""
    quick, full = choice.settings.quick, choice.full
    for dtype in ("bf16", "fp32") if full else ("bf16",):
        for tokens in (64,) if quick else scaling.TOKENS:
            measure = partial(scaling.run, tokens, dtype, choice.device, full, quick)
            yield Job(f"{dtype}, {tokens}", measure)


def tau(choice: Choice) -> Iterator[Job]:
    """Routed gradients: error and time against tau, on tokens of low and of higher entropy."""
    quick = choice.settings.quick
    for temperature in (0.6, 1.0):
        measure = partial(routing.run, temperature, 1 if quick else 2, quick)
        yield Job(f"T={temperature:g}", measure)


def heads(choice: Choice) -> Iterator[Job]:
    """The heads of real models in all three tasks: for a GPU."""
    for name, (width, vocab) in MODELS.items():
        base = Spec(name=name, tokens=8192, vocab=vocab, width=width, device=choice.device)
        base = replace(TINY, name=name, device=choice.device) if choice.settings.quick else base
        for task in ("logprobs", "frozen", "loss"):
            yield _job(choice, replace(base, task=task))


PARTS = {
    "loss": loss,
    "tasks": tasks,
    "scaling": scale,
    "sweeps": sweeps,
    "routing": tau,
    "heads": heads,
}


def default_parts(choice: Choice) -> list[str]:
    """`routing` comes with --full or by name, and so do `heads` on a CPU."""
    if choice.device == "cuda":
        return [name for name in PARTS if name != "routing"]
    return [name for name in PARTS if name != "heads" and (name != "routing" or choice.full)]
