"""Each Triton kernel against float64: statistics of tiles, log-probabilities, gradients of logits.

Interpreted where there is no GPU: the same code, at small sizes, and in the configurations that
GPUs launch.
"""

from __future__ import annotations

import ast
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import dtype_id
from pairwise import pairwise
from torch import Tensor

pytest.importorskip("triton")

from fused_grpo_kernels import fold, forward, pairs
from fused_grpo_kernels.combine import combine
from fused_grpo_kernels.gradients import logit_gradients
from fused_grpo_kernels.registry import INTERPRETER, TARGETS, kernel_cases, target_of
from fused_grpo_kernels.target import target_logits
from fused_grpo_kernels.types import Epilogue, RowStats, TileStats, empty_statistics

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INF = float("inf")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Head:
    """A head on which every option can be set, its logits in float64."""

    def __init__(
        self,
        tokens: int = 33,
        vocab: int = 257,
        width: int = 48,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        softcap: float | None = None,
        scale: float = 1.0,
        temperature: str = "number",
        std: float = 2.0,
    ) -> None:
        self.hidden = normal(tokens, width).to(dtype).to(DEVICE)
        self.weight = (normal(vocab, width) * std / math.sqrt(width)).to(dtype).to(DEVICE)
        self.bias = normal(vocab).float().to(DEVICE) if bias else None
        self.target = torch.randint(vocab, (tokens,)).to(DEVICE)
        self.temperature = torch.full((tokens,), 0.8)
        if temperature == "token":
            self.temperature = torch.linspace(0.5, 1.5, tokens)
        self.temperature = self.temperature.to(DEVICE)
        self.softcap, self.scale = softcap, scale

    @property
    def epilogue(self) -> Epilogue:
        return Epilogue.of(self.bias, self.scale, self.softcap, self.temperature)

    def raw(self) -> Tensor:
        """Products and bias [c, V], float64: what gradients are taken of."""
        x = self.hidden.double() @ self.weight.double().T
        return x if self.bias is None else x + self.bias.double()

    def logits(self, raw: Tensor) -> Tensor:
        z = raw * self.scale
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        return z / self.temperature.double()[:, None]


def fused_statistics(
    head: Head, spread: bool, store: bool, config: Any = None
) -> tuple[TileStats, Tensor | None]:
    exps = rows_of(head, torch.bfloat16) if store else None
    stats = forward.project(
        head.hidden,
        head.weight,
        head.target,
        head.epilogue,
        spread=spread,
        exps=exps,
        config=config,
    )
    return stats, exps


def folded_statistics(
    head: Head, spread: bool, store: bool, part: int | None = None
) -> tuple[TileStats, Tensor | None]:
    """The vocabulary in parts of `part` entries, a multiple of the tile."""
    vocab, tile = head.weight.shape[0], fold.tile_width(DEVICE)
    stats = empty_statistics(head.hidden.shape[0], vocab, tile, spread, DEVICE)
    exps = rows_of(head, torch.float32)
    part = part or vocab
    for start in range(0, vocab, part):
        x = exps[:, start : start + part]
        x.copy_(head.hidden.float() @ head.weight[start : start + part].float().T)
        fold.fold(x, start, vocab, head.target, head.epilogue, stats, store)
    return stats, exps if store else None


def rows_of(head: Head, dtype: torch.dtype) -> Tensor:
    """[c, V] of NaN: what a kernel leaves unwritten is seen."""
    tokens, vocab = head.hidden.shape[0], head.weight.shape[0]
    wide = torch.full((tokens, -(-vocab // 16) * 16), torch.nan, dtype=dtype, device=DEVICE)
    return wide[:, :vocab]


def check_statistics(head: Head, stats: TileStats, exps: Tensor | None, tol: float = 2e-6) -> None:
    """Against the definitions in `common`, tile by tile."""
    z = head.logits(head.raw())
    tol *= 1 + float(z[z.isfinite()].abs().max())
    z.scatter_(1, head.target[:, None], -INF)
    for j, part in enumerate(z.split(stats.tile, 1)):
        top = part.amax(1)
        empty = top == -INF
        e = torch.where(empty[:, None], 0.0, (part - top[:, None]).exp())
        top = torch.where(empty, 0.0, top)
        torch.testing.assert_close(stats.top[j].double(), top, rtol=0, atol=tol)
        torch.testing.assert_close(stats.mass[j].double(), e.sum(1), rtol=1e-6 + 10 * tol, atol=0)
        assert not stats.mass[j][empty].any()
        if stats.spread is not None:
            spread = torch.xlogy(e, e).sum(1)
            torch.testing.assert_close(stats.spread[j].double(), spread, rtol=1e-5, atol=10 * tol)
        if exps is not None:
            got = exps[:, j * stats.tile : j * stats.tile + part.shape[1]].double()
            rtol = 2**-8 if exps.dtype == torch.bfloat16 else 1e-6 + 20 * tol
            torch.testing.assert_close(got, e, rtol=rtol, atol=1e-30)


def check_rows(head: Head, rows: RowStats, tol: float = 1e-5) -> None:
    """Log-probabilities, entropies and 1 - p against float64."""
    z = head.logits(head.raw())
    log_p = z.log_softmax(1)
    own = log_p.gather(1, head.target[:, None])[:, 0]
    assert (rows.logps <= 0).all()
    torch.testing.assert_close(rows.logps.double(), own, rtol=tol, atol=tol)
    torch.testing.assert_close(rows.one_minus_p.double(), -own.expm1(), rtol=10 * tol, atol=1e-9)
    if rows.entropy is not None:
        h = -torch.xlogy(log_p.exp(), log_p.exp()).sum(1)
        torch.testing.assert_close(rows.entropy.double(), h, rtol=tol, atol=tol)


SHAPES = pairwise(
    {
        "tokens": (1, 5, 127, 130),
        "vocab": (17, 127, 257, 1000, 4099),
        "width": (16, 48, 96, 576),
        "dtype": (torch.bfloat16, torch.float16, torch.float32),
        "bias": (False, True),
        "softcap": (None, 5.0),
        "scale": (1.0, -0.7),
        "temperature": ("number", "token"),
        "spread": (False, True),
        "store": (False, True),
    }
)


@pytest.mark.parametrize("row", SHAPES, ids=lambda r: f"{r['tokens']}-{r['vocab']}-{r['width']}")
def test_statistics_of_both_products(row: dict[str, Any]) -> None:
    """K1: The fused product and torch's product with a fold give the same, which is float64's."""
    row = dict(row)
    spread, store = row.pop("spread"), row.pop("store")
    head = Head(**row)
    folded = folded_statistics(head, spread, store)
    check_statistics(head, *folded)
    z_target = target_logits(head.hidden, head.weight, head.target, head.epilogue)
    check_rows(head, combine(folded[0], z_target))
    if row["dtype"] == torch.float32:
        return
    fused = fused_statistics(head, spread, store and row["dtype"] == torch.bfloat16)
    check_statistics(head, *fused)
    check_rows(head, combine(fused[0], z_target))


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("name", ["sm_80", "sm_90", "gfx942"])
def test_configurations_of_gpus(name: str, store: bool) -> None:
    """K3: block sizes and descriptors of GPUs, one by one, on sizes none of them divides."""
    head = Head(130, 300, 80, torch.bfloat16, bias=True)
    for config in forward.configs(TARGETS[name], store):
        stats, exps = fused_statistics(head, True, store, config)
        check_statistics(head, stats, exps)
        if DEVICE.type == "cpu":
            break  # the others differ in the order of blocks and the depth of the pipeline


def test_the_vocabulary_in_parts() -> None:
    head = Head(9, 1000, bias=True, softcap=4.0)
    tile = fold.tile_width(DEVICE)
    whole, exps = folded_statistics(head, True, True)
    parts, same_exps = folded_statistics(head, True, True, part=3 * tile)
    assert torch.equal(whole.mass, parts.mass)
    assert torch.equal(whole.spread, parts.spread)
    assert torch.equal(exps, same_exps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_id)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-4, 1e4])
def test_huge_and_tiny_logits(magnitude: float, dtype: torch.dtype) -> None:
    head = Head(7, 257, 16, dtype)
    head.hidden = torch.zeros_like(head.hidden)
    head.hidden[:, 0] = magnitude
    head.weight[:, 0] = torch.arange(257, device=DEVICE) % 3 - 1  # logits of -1, 0 or 1 times that
    head.temperature = torch.ones_like(head.temperature)
    statistics = fused_statistics if dtype == torch.bfloat16 else folded_statistics
    stats, exps = statistics(head, True, True)
    check_statistics(head, stats, exps, tol=1e-10)
    rows = combine(stats, target_logits(head.hidden, head.weight, head.target, head.epilogue))
    check_rows(head, rows)


def rows_at_infinity() -> dict[str, Tensor]:
    """Which of 200 vocabulary entries are at -inf."""
    entries = torch.arange(200)
    return {
        "one": entries == 3,
        "a_tile": entries < 64,
        "all_but_one_tile": entries >= 64,
        "all_but_the_targets": entries != 5,
        "targets": entries == 5,
    }


@pytest.mark.parametrize("fused", [False, True], ids=["fold", "fused"])
@pytest.mark.parametrize("name", rows_at_infinity())
def test_vocabulary_at_minus_infinity(name: str, fused: bool) -> None:
    """Entries, whole tiles, all others, or the target itself: no NaN, as if they did not exist."""
    head = Head(6, 200, 48, torch.bfloat16 if fused else torch.float32, bias=True)
    head.target.fill_(5)
    head.bias[rows_at_infinity()[name].to(DEVICE)] = -INF
    stats, exps = (fused_statistics if fused else folded_statistics)(head, True, True)
    check_statistics(head, stats, exps)
    rows = combine(stats, target_logits(head.hidden, head.weight, head.target, head.epilogue))
    check_rows(head, rows)
    for value in (rows.one_minus_p, rows.entropy, rows.shift):
        assert torch.isfinite(value).all()


def test_nan_stays_in_its_row() -> None:
    head = Head(6, 200, 48, torch.bfloat16)
    head.hidden[2, 7] = torch.nan
    stats, _ = fused_statistics(head, True, False)
    rows = combine(stats, target_logits(head.hidden, head.weight, head.target, head.epilogue))
    for value in (rows.logps, rows.one_minus_p, rows.entropy):
        assert value.isnan().tolist() == [False, False, True, False, False, False]


GRADIENTS = pairwise(
    {
        "tokens": (1, 33, 130),
        "vocab": (17, 257, 1000),
        "bias": (False, True),
        "softcap": (None, 5.0),
        "scale": (1.0, -0.7),
        "temperature": ("number", "token"),
        "entropy": (False, True),
        "kept": ("all", "some", "one"),
        "place": ("same", "other", "rounded"),
    }
)


@pytest.mark.parametrize("row", GRADIENTS, ids=lambda r: f"{r['tokens']}-{r['vocab']}-{r['kept']}")
def test_gradients_of_the_logits(row: dict[str, Any]) -> None:
    """All of it in fp32: every row of dL/dx, its column sums, and rows that move up in place."""
    row = dict(row)
    entropy, kind, place = row.pop("entropy"), row.pop("kept"), row.pop("place")
    head = Head(**row)
    n = head.hidden.shape[0]
    stats, exps = folded_statistics(head, entropy, True)
    z_target = target_logits(head.hidden, head.weight, head.target, head.epilogue)
    rows = combine(stats, z_target)
    g = torch.randn(n, device=DEVICE)
    e = torch.randn(n, device=DEVICE) if entropy else None
    kept = {"all": None, "some": torch.arange(n)[n // 3 :: 2], "one": torch.tensor([n - 1])}[kind]
    kept = None if kept is None else kept.to(DEVICE)

    raw = head.raw().requires_grad_()
    log_p = head.logits(raw).log_softmax(1)
    total = (g * log_p.gather(1, head.target[:, None])[:, 0]).sum()
    if e is not None:
        total = total - (e[:, None] * log_p.exp() * log_p).sum()
    total.backward()
    want = raw.grad if kept is None else raw.grad[kept]

    out = {
        "same": lambda: exps,
        "other": lambda: rows_of(head, torch.float32),
        "rounded": lambda: rows_of(head, torch.bfloat16),
    }[place]()
    sums = logit_gradients(
        exps, head.target, stats, rows, head.epilogue, g, e, kept, out, bias=True
    )
    got = out[: want.shape[0]].double()
    scale = want.abs().amax(1, keepdim=True)
    assert (
        (got - want).abs() <= 2e-5 * scale + (2**-8 * want.abs() if place == "rounded" else 0)
    ).all()
    assert (sums.double() - want.sum(0)).abs().max() <= 2e-5 * want.abs().sum(0).max()


def test_tokens_without_a_coefficient_give_exact_zeros() -> None:
    """Selected, not multiplied: whatever their logits are, unless the token itself is broken."""
    head = Head(5, 100)
    stats, exps = folded_statistics(head, False, True)
    rows = combine(stats, target_logits(head.hidden, head.weight, head.target, head.epilogue))
    g = torch.tensor([1.0, 0.0, 0.0, 2.0, 0.0], device=DEVICE)
    exps[1] = INF
    rows.one_minus_p[2] = torch.nan
    out = logit_gradients(exps, head.target, stats, rows, head.epilogue, g, None, None, exps, False)
    assert out is None
    assert not exps[[1, 4]].any()
    assert exps[2].isnan().any()
    assert torch.isfinite(exps[[0, 3]]).all()


def test_the_same_call_gives_the_same_bits() -> None:
    """K3: Nothing adds up over calls or over launches."""
    head = Head(130, 257, 48, torch.bfloat16, bias=True)
    first, second = (fused_statistics(head, True, True) for _ in range(2))
    assert torch.equal(first[1], second[1])
    for name in ("top", "mass", "spread"):
        assert torch.equal(getattr(first[0], name), getattr(second[0], name))


# --- the registry --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
def test_cases_describe_their_kernels(name: str) -> None:
    """K2: Every argument of a kernel is typed or constant, none twice, in every case."""
    cases = list(kernel_cases(TARGETS[name]))
    assert len({(case.name, case.dtype) for case in cases}) == len(cases)
    for case in cases:
        constants = {k for k, kind in case.signature.items() if kind == "constexpr"}
        typed = set(case.signature) - constants
        assert typed | set(case.constexprs) == set(case.fn.arg_names), case.name
        assert not typed & set(case.constexprs), case.name
        assert set(case.divisible) <= set(case.fn.arg_names), case.name


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("store", [False, True])
def test_launches_choose_among_the_cases(name: str, store: bool) -> None:
    target = TARGETS[name]
    listed = [case.config for case in kernel_cases(target)]
    for config in forward.configs(target, store):
        assert config in listed
        assert config.constexprs["BN"] == 2 * fold.config_of(target).constexprs["TILE"]


def test_what_the_fused_product_refuses() -> None:
    weight = torch.zeros(33, 48, dtype=torch.bfloat16)
    sm_90 = TARGETS["sm_90"]
    assert forward.refusal(torch.bfloat16, weight, sm_90) is None
    assert forward.refusal(torch.float16, weight.half(), sm_90) is None
    for dtype, other in (
        (torch.float32, weight.float()),
        (torch.float32, weight),
        (torch.bfloat16, torch.zeros(33, 50, dtype=torch.bfloat16)),
        (torch.bfloat16, torch.zeros(48, 33, dtype=torch.bfloat16).T),
        (torch.bfloat16, torch.zeros(33, 96, dtype=torch.bfloat16)[:, 4:52]),
        (torch.bfloat16, torch.zeros(33 * 48 + 1, dtype=torch.bfloat16)[1:].view(33, 48)),
    ):
        assert forward.refusal(dtype, other, sm_90)
    assert forward.refusal(torch.bfloat16, weight, TARGETS["sm_90"].__class__("cuda", 75, 32))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU is at hand")
def test_the_target_of_a_cpu_is_the_interpreter() -> None:
    assert target_of(torch.device("cpu")) == INTERPRETER
    with pytest.raises(ValueError, match="meta"):
        target_of(torch.device("meta"))


def test_no_product_of_fp32_is_rounded_to_tf32() -> None:
    """K4: every product says how precise it is; TF32 where both operands came as fp16 alone."""
    for path in Path(forward.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.dot":
                (said,) = [k.value for k in node.keywords if k.arg == "input_precision"]
                assert ast.unparse(said) in ("'ieee'", "PRECISION"), path.name
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for hidden, weight, target in itertools.product(dtypes, dtypes, TARGETS.values()):
        pair = torch.zeros(2, 4, dtype=hidden), torch.zeros(3, 4, dtype=weight)
        precision = pairs.Operands(*pair, 128, torch.float32).switches(target)["PRECISION"]
        if precision != "ieee":
            assert hidden == weight == torch.float16
