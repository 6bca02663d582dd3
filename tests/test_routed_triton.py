"""The routed backward by kernels: what is kept, and the gradients made of it, against float64.

The oracle draws the same noise in Python's integers, from masses in float64, and puts 1{kept} / q
into the formula of the logits' gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from pairwise import pairwise
from torch import Tensor

pytest.importorskip("triton")

from fused_grpo import grpo_loss, linear_logprobs, policy_loss, triton_routed
from fused_grpo.routed import Route, token_keys
from fused_grpo_kernels import pairs as pair_kernels
from fused_grpo_kernels import routed as selection
from fused_grpo_kernels.registry import TARGETS

TILE = 64  # of interpreted kernels
SEED, TAU = 11, 0.15


@dataclass(frozen=True)
class Case:
    """A head with tokens in `hidden` [S, L, H]; logits spread enough that tiles are light and
    heavy."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None = None
    temperature: float | Tensor = 1.0
    scale: float = 1.0
    softcap: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {
            "bias": self.bias,
            "temperature": self.temperature,
            "logit_scale": self.scale,
            "softcap": self.softcap,
        }


def make_case(
    sequences: int = 3,
    length: int = 7,
    vocab: int = 257,
    width: int = 40,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    bias: bool = False,
    per_token: bool = False,
    std: float = 3.0,
    **head: Any,
) -> Case:
    hidden = torch.randn(sequences, length, width).to(dtype)
    weight = (torch.randn(vocab, width) * std / math.sqrt(width)).to(weight_dtype or dtype)
    target = torch.randint(vocab, (sequences, length))
    temperature = torch.linspace(0.7, 1.6, target.numel()).view(target.shape) if per_token else 1.2
    b = torch.randn(vocab) if bias else None
    return Case(hidden, weight, target, b, temperature, **head)


def mix(x: int) -> int:
    x = ((x ^ x >> 16) * 0x7FEB352D) % 2**32
    x = ((x ^ x >> 15) * 0x846CA68B) % 2**32
    return x ^ x >> 16


@dataclass
class Oracle:
    """What is kept of the tokens [n] of a case, in float64."""

    raw: Tensor  # [n, V]
    z: Tensor
    q: Tensor  # [n, J]
    kept: Tensor  # [n, J] bool
    log_p: Tensor  # [n, V]

    @staticmethod
    def of(case: Case, keys: Tensor, tau: float = TAU) -> Oracle:
        hidden = case.hidden.double().flatten(0, -2)
        raw = (hidden @ case.weight.double().T).requires_grad_()
        z = raw if case.bias is None else raw + case.bias.double()
        z = z * case.scale
        if case.softcap is not None:
            z = case.softcap * (z / case.softcap).tanh()
        t = case.temperature
        z = z / (t.double().reshape(-1, 1) if isinstance(t, Tensor) else t)
        log_p = z.detach().log_softmax(1)
        target = case.target.reshape(-1)
        others = log_p.exp().scatter(1, target[:, None], 0.0)
        tiles = -(-others.shape[1] // TILE)
        padded = torch.nn.functional.pad(others, (0, tiles * TILE - others.shape[1]))
        q = (padded.view(-1, tiles, TILE).sum(2) / tau).clamp(max=1)
        q[torch.arange(len(q)), target // TILE] = 1
        u = [[mix(k ^ mix(j + 1)) for j in range(tiles)] for k in keys.tolist()]
        noise = (torch.tensor(u, dtype=torch.float64) + 0.5) * 2.0**-32
        return Oracle(raw, z, q, (noise < q) | (q == 1), log_p)

    def factors(self, vocab: int, dense: Tensor | None = None) -> Tensor:
        """[n, V] 1{kept} / q."""
        m = self.kept / self.q.clamp_min(1e-300)
        if dense is not None:
            m[dense] = 1
        return m.repeat_interleave(TILE, 1)[:, :vocab]

    def product_gradient(self, case: Case, g: Tensor, e: Tensor | None, m: Tensor) -> Tensor:
        """[n, V] dL/d(hidden @ weight.T) by the formula; m: factors."""
        p, target = self.log_p.exp(), case.target.reshape(-1, 1)
        m = m.scatter(1, target, 1.0)
        a = -g[:, None] * p * m
        a.scatter_add_(1, target, g[:, None])
        if e is not None:
            h = -(p * self.log_p).sum(1, keepdim=True)
            a = a - e[:, None] * p * (self.log_p + h) * m
        return torch.autograd.grad(self.z, self.raw, a, retain_graph=True)[0]

    def gradients(
        self, case: Case, g: Tensor, e: Tensor | None, m: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dz = self.product_gradient(case, g, e, m)
        hidden = case.hidden.double().flatten(0, -2)
        return (dz @ case.weight.double()).view(case.hidden.shape), dz.T @ hidden, dz.sum(0)


def keys_of(case: Case, ids: Tensor | None = None) -> Tensor:
    count, length = case.target.shape
    ids = torch.arange(count) if ids is None else ids
    return token_keys(SEED, ids.repeat_interleave(length), torch.arange(length).repeat(count))


@pytest.fixture
def nothing_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_routed, "_DENSE_SHARE", 2.0)


@pytest.fixture
def selected(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Receives what every call of `select` returns."""
    calls: list[Any] = []
    real = selection.select

    def select(*arguments: Any) -> Any:
        calls.append(real(*arguments))
        return calls[-1]

    monkeypatch.setattr(selection, "select", select)
    return calls


def run(
    case: Case,
    g: Tensor,
    e: Tensor | None = None,
    leaves: str = "hwb",
    **options: Any,
) -> list[Tensor | None]:
    """[dh, dW, db] of sum g logp + e entropy by the kernels; None where frozen."""
    tensors = [case.hidden, case.weight, case.bias]
    tensors = [
        None if x is None else x.detach().clone().requires_grad_(name in leaves)
        for name, x in zip("hwb", tensors, strict=True)
    ]
    hidden, weight, bias = tensors
    given = {"backward": "routed", "route_tau": TAU, "route_seed": SEED, **options}
    out = linear_logprobs(
        hidden,
        weight,
        case.target,
        **{**case.options, "bias": bias},
        entropy=e is not None,
        backend="triton",
        **given,
    )
    loss = (out.logps * g.view(case.target.shape)).sum()
    if e is not None:
        loss = loss + (out.entropy * e.view(case.target.shape)).sum()
    loss.backward()
    return [None if x is None else x.grad for x in tensors]


def coefficients(case: Case) -> tuple[Tensor, Tensor]:
    """g and e [n] in float32's numbers, the first token without either."""
    n = case.target.numel()
    g, e = torch.linspace(-1, 1.3, n), torch.linspace(0.4, -0.3, n)
    g[0] = e[0] = 0
    return g, e


def check(found: list[Tensor | None], wanted: tuple[Tensor, ...], tol: float) -> None:
    for name, mine, theirs in zip(("dh", "dW", "db"), found, wanted, strict=True):
        if mine is not None:
            error = float((mine.double() - theirs).norm() / theirs.norm())
            assert error <= tol, f"{name}: {error:.2e}"


# --- the gradients -------------------------------------------------------------------------------

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 5e-4}
ROWS = pairwise(
    {
        "dtype": (torch.float32, torch.bfloat16, torch.float16),
        "bias": (False, True),
        "head": ({}, {"softcap": 5.0}, {"scale": 0.6}),
        "per_token": (False, True),
        "entropy": (False, True),
        "leaves": ("hwb", "h", "wb", "w"),
        "weight_grad": ("routed", "exact"),
        "width": (40, 48, 64),
    }
)


@pytest.mark.usefixtures("nothing_dense")
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_gradients_are_the_formula_of_the_kept_pairs(row):
    case = make_case(
        dtype=row["dtype"],
        width=row["width"],
        bias=row["bias"],
        per_token=row["per_token"],
        **row["head"],
    )
    g, e = coefficients(case)
    upstream = (g.double(), e.double() if row["entropy"] else None)
    oracle = Oracle.of(case, keys_of(case))
    share = float(oracle.kept.double().mean())
    assert 0.4 < share < 0.9, "too little is left out, or too much"
    m = oracle.factors(len(case.weight))
    dh, *rest = oracle.gradients(case, *upstream, m)
    if row["weight_grad"] == "exact":
        rest = oracle.gradients(case, *upstream, torch.ones_like(m))[1:]
    found = run(
        case,
        g,
        e if row["entropy"] else None,
        row["leaves"],
        route_weight_grad=row["weight_grad"],
    )
    check(found, (dh, *rest), TOLERANCE[row["dtype"]])
    if found[0] is not None:
        assert torch.equal(found[0][0, 0], torch.zeros_like(found[0][0, 0]))


@pytest.mark.usefixtures("nothing_dense")
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str
)
def test_operands_of_two_dtypes(dtypes):
    case = make_case(dtype=dtypes[0], weight_dtype=dtypes[1], bias=True)
    g, e = coefficients(case)
    oracle = Oracle.of(case, keys_of(case))
    wanted = oracle.gradients(case, g.double(), e.double(), oracle.factors(257))
    check(run(case, g, e), wanted, 3e-3)  # results are rounded to bf16


@pytest.mark.usefixtures("nothing_dense")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_of_the_inputs_do_not_matter(dtype):
    case = make_case(dtype=dtype, width=48)
    g, e = coefficients(case)
    wide = torch.zeros(3, 9, 48, dtype=dtype)
    wide[:, 1:8] = case.hidden
    tall = torch.zeros(48, 257, dtype=dtype)
    tall.copy_(case.weight.T)
    plain = run(case, g, e)
    for changed in (
        {"hidden": wide[:, 1:8]},
        {"hidden": case.hidden.transpose(0, 1).contiguous().transpose(0, 1)},
        {"hidden": case.hidden.transpose(1, 2).contiguous().transpose(1, 2)},
        {"weight": tall.T},
    ):
        mine = replace(case, **changed)
        found = run_views(mine, g, e)
        for a, b in zip(found, plain[:2], strict=True):
            assert a is not None
            assert b is not None
            torch.testing.assert_close(a, b, rtol=0, atol=float(b.float().abs().max()) * 4e-3)


def run_views(case: Case, g: Tensor, e: Tensor) -> list[Tensor | None]:
    """As `run`, with the tensors as they lie in memory."""
    hidden, weight = (x.detach().requires_grad_() for x in (case.hidden, case.weight))
    out = linear_logprobs(
        hidden,
        weight,
        case.target,
        **case.options,
        entropy=True,
        backend="triton",
        backward="routed",
        route_tau=TAU,
        route_seed=SEED,
    )
    shape = case.target.shape
    ((out.logps * g.view(shape)).sum() + (out.entropy * e.view(shape)).sum()).backward()
    return [hidden.grad, weight.grad]


@pytest.mark.usefixtures("nothing_dense")
@pytest.mark.parametrize("name", ["sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_block_sizes_that_gpus_launch(monkeypatch, dtype, name):
    blocks, block = pair_kernels.config_of, selection.config_of
    target = TARGETS[name]

    def config_of(kind: str, _: Any, *how: Any) -> Any:
        return blocks(kind, target, *how)

    monkeypatch.setattr(pair_kernels, "config_of", config_of)
    monkeypatch.setattr(selection, "config_of", lambda _: block(target))
    case = make_case(sequences=5, length=15, width=144, dtype=dtype, bias=True, softcap=6.0)
    g, e = coefficients(case)
    oracle = Oracle.of(case, keys_of(case))
    wanted = oracle.gradients(case, g.double(), e.double(), oracle.factors(257))
    check(run(case, g, e), wanted, TOLERANCE[dtype])


@pytest.mark.usefixtures("nothing_dense")
@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo"},
        {"loss_type": "dapo", "entropy_coef": 0.05},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"importance_sampling_level": "sequence", "route_weight_grad": "exact"},
    ],
    ids=str,
)
def test_through_the_loss(options):
    """g is that of float64's log-probabilities."""
    case = make_case(sequences=4, length=9, bias=True)
    mask = torch.ones_like(case.target, dtype=torch.bool)
    mask[1, 5:] = False
    exact = linear_logprobs(
        case.hidden.double(),
        case.weight.double(),
        case.target,
        **{**case.options, "bias": case.bias.double()},
        entropy=True,
    )
    logps, h = (x.detach().requires_grad_() for x in (exact.logps, exact.entropy))
    old = exact.logps.detach() + 0.1 * torch.randn_like(exact.logps)
    advantages = torch.tensor([1.0, -0.7, 0.0, 0.4])
    loss_options = {k: v for k, v in options.items() if not k.startswith("route")}
    given = {"completion_mask": mask, "old_per_token_logps": old.float(), **loss_options}
    policy_loss(
        logps,
        advantages.double(),
        **{**given, "old_per_token_logps": old.float().double()},
        entropies=h if options.get("entropy_coef") else None,
    ).loss.backward()

    oracle = Oracle.of(case, keys_of(case))
    m, e = oracle.factors(257), None if h.grad is None else h.grad.reshape(-1)
    wanted = list(oracle.gradients(case, logps.grad.reshape(-1), e, m))
    if "route_weight_grad" in options:
        wanted[1:] = oracle.gradients(case, logps.grad.reshape(-1), e, torch.ones_like(m))[1:]
    leaves = [x.clone().requires_grad_() for x in (case.hidden, case.weight, case.bias)]
    out = grpo_loss(
        leaves[0],
        leaves[1],
        case.target,
        advantages,
        **{**case.options, "bias": leaves[2]},
        **given,
        **({} if "route_weight_grad" not in options else {"route_weight_grad": "exact"}),
        backend="triton",
        backward="routed",
        route_tau=TAU,
        route_seed=SEED,
        chunk_bytes=40_000,
    )
    out.loss.backward()
    check([x.grad for x in leaves], tuple(wanted), 1e-5)
    counted = mask.reshape(-1)
    tiles = oracle.kept[counted].sum(1).double() * TILE
    assert float(out.metrics["route/kept_per_token"]) == pytest.approx(
        float(tiles.clamp(max=256).mean())
    )
    assert float(out.metrics["route/dense_fraction"]) == 0


def test_the_metrics_are_those_of_the_tiles(selected):
    case = make_case(sequences=4, length=9)
    oracle = Oracle.of(case, keys_of(case))
    run(case, coefficients(case)[0])
    p = oracle.log_p.exp().scatter(1, case.target.reshape(-1, 1), 0.0)
    s = torch.nn.functional.pad(p, (0, 63)).view(len(p), -1, TILE).sum(2)
    numbers = torch.cat([routing for _, _, routing in selected])[: len(p)].double()
    assert torch.equal(numbers[:, 0] > 0, torch.ones(len(p), dtype=torch.bool))
    free = torch.where(oracle.q < 1, s * (TAU - s), 0.0)
    torch.testing.assert_close(numbers[:, 1], free.sum(1), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(numbers[:, 2], s.square().sum(1), rtol=1e-4, atol=1e-7)


# --- on average ----------------------------------------------------------------------------------


@pytest.fixture
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs for the interpreter."""
    blocks = {"BM": 256, "BP": 256, "BH": 16, "BK": 16, "BV": 64}
    real, real_block = pair_kernels.config_of, selection.config_of

    def widened(config: Any) -> Any:
        return replace(config, constexprs=dict(config.constexprs) | blocks_of(config))

    def blocks_of(config: Any) -> dict[str, int]:
        return {k: v for k, v in blocks.items() if k in config.constexprs}

    monkeypatch.setattr(pair_kernels, "config_of", lambda *a: widened(real(*a)))
    monkeypatch.setattr(selection, "config_of", lambda t: widened(real_block(t)))


@pytest.mark.usefixtures("nothing_dense", "large_blocks")
@pytest.mark.parametrize("copies", [64, 512])
def test_the_mean_over_draws_is_the_exact_gradient(copies):
    """Copies of the same tokens with other sequence ids: errors of dh, dW and db, over the standard
    deviation that the formula of the variance gives, have mean square 1 for any number of draws."""
    one = make_case(sequences=1, length=6, width=16, std=2.5)
    repeat = (copies, 1, 1)
    case = replace(one, hidden=one.hidden.repeat(repeat), target=one.target.repeat(copies, 1))
    case = replace(case, bias=torch.zeros(257))
    g = torch.linspace(-1, 1, 6)
    dh, dw, db = run(case, g.repeat(copies))
    exact = Oracle.of(one, keys_of(one))
    a = exact.product_gradient(one, g.double(), None, torch.ones(6, 257, dtype=torch.float64))
    a = a.scatter(1, one.target.view(-1, 1), 0.0)  # what is drawn
    loose = exact.factors(257) * 0 + (1 / exact.q - 1).repeat_interleave(TILE, 1)[:, :257]
    h, w = one.hidden[0].double(), one.weight.double()
    by_tile = torch.nn.functional.pad(a, (0, 63)).view(6, -1, TILE)
    tiles = torch.nn.functional.pad(w, (0, 0, 0, 63)).view(-1, TILE, 16)
    share = torch.einsum("tjv,jvh->tjh", by_tile, tiles)
    variance = {
        "dh": (share.square() * (1 / exact.q - 1)[..., None]).sum(1),
        "dW": (a.square() * loose).T @ h.square(),
        "db": (a.square() * loose).sum(0),
    }
    wanted = exact.gradients(
        replace(one, bias=None), g.double(), None, torch.ones(6, 257, dtype=torch.float64)
    )
    found = {"dh": dh.double().mean(0), "dW": dw.double() / copies, "db": db.double() / copies}
    for (name, mine), theirs in zip(found.items(), wanted, strict=True):
        var = variance[name] / copies
        drawn = var > 1e-2 * var.mean()
        z = ((mine - theirs.view_as(mine)).square() / var)[drawn]
        assert 0.4 < float(z.mean()) < 1.9, f"{name}: {float(z.mean()):.2f}"
        assert float(z.max()) < 36, f"{name}: {float(z.max()):.1f}"


def test_how_often_a_pair_is_kept():
    """Frequencies over 2,048 keys against q, within five standard deviations."""
    case = make_case(sequences=1, length=2, width=16)
    many = replace(case, hidden=case.hidden.repeat(2048, 1, 1), target=case.target.repeat(2048, 1))
    oracle = Oracle.of(many, keys_of(many))
    frequency = oracle.kept.view(2048, 2, -1).double().mean(0)
    q = oracle.q.view(2048, 2, -1)[0]
    assert bool((q < 1).any())
    deviation = (q * (1 - q) / 2048).sqrt()
    assert bool(((frequency - q).abs() <= 5 * deviation + 1e-12).all())


# --- what decides --------------------------------------------------------------------------------


def kept_by_token(calls: list[Any], ids: list[tuple[int, int]]) -> dict[Any, list[Any]]:
    """(sequence id, position) -> [(tile, 1 / q)] of all pairs of the calls so far; empties them."""
    found: dict[Any, list[Any]] = {name: [] for name in ids}
    for pairs, _, _ in calls:
        columns = (pairs.token.tolist(), pairs.tile.tolist(), pairs.value.tolist())
        for token, tile, value in zip(*columns, strict=True):
            found[ids[token]].append((tile, value))
    calls.clear()
    return found


@pytest.mark.usefixtures("nothing_dense")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_tokens_keep_the_same_tiles(selected, dtype):
    """Whatever the order, the packing, the chunks, and the company: the same pairs and the same
    weights, bit for bit, and gradients that agree to rounding."""
    case = make_case(sequences=6, length=9, width=48, dtype=dtype)
    g, ids = torch.linspace(-1, 1.2, 54).view(6, 9), torch.tensor([3, 8, 1, 2**40, 5, 0])
    names = [(int(i), t) for i in ids for t in range(9)]
    dh, dw, _ = run(case, g, sequence_ids=ids)
    reference = kept_by_token(selected, names)
    assert 54 < sum(map(len, reference.values())) < 54 * 5
    tol = TOLERANCE[dtype]

    for chunk_bytes in (1, 60_000):
        chunked = run(case, g, sequence_ids=ids, chunk_bytes=chunk_bytes)
        assert len(selected) > 1
        assert kept_by_token(selected, names) == reference
        check([*chunked[:2], None], (dh.double(), dw.double(), dw), tol)

    order = torch.tensor([4, 0, 5, 2, 1, 3])
    turned = replace(case, hidden=case.hidden[order], target=case.target[order])
    mine = run(turned, g[order], sequence_ids=ids[order])
    names_now = [(int(i), t) for i in ids[order] for t in range(9)]
    assert kept_by_token(selected, names_now) == reference
    check([mine[0], mine[1], None], (dh[order].double(), dw.double(), dw), tol)

    alone = replace(case, hidden=case.hidden[2:3], target=case.target[2:3])
    run(alone, g[2:3], sequence_ids=ids[2:3])
    mine_alone = kept_by_token(selected, [(1, t) for t in range(9)])
    assert mine_alone == {k: v for k, v in reference.items() if k[0] == 1}


@pytest.mark.usefixtures("nothing_dense")
def test_packed_and_padded_sequences_keep_the_same_tiles(selected):
    case = make_case(sequences=4, length=9)
    lengths = [9, 4, 7, 1]
    mask = torch.arange(9)[None, :] < torch.tensor(lengths)[:, None]
    names = [(i, t) for i, n in enumerate(lengths) for t in range(n)]
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0])
    options: dict[str, Any] = {
        **{"backend": "triton", "backward": "routed", "route_tau": TAU, "route_seed": SEED},
        "temperature": 1.2,
    }
    grads = []
    for packed in (False, True):
        hidden, target = case.hidden.clone(), case.target
        layout: dict[str, Any] = {"completion_mask": mask}
        if packed:
            hidden, target = hidden[mask], target[mask]
            layout = {"cu_seqlens": torch.tensor([0, 9, 13, 20, 21])}
        hidden.requires_grad_()
        grpo_loss(hidden, case.weight, target, advantages, **layout, **options).loss.backward()
        grads.append(hidden.grad if packed else hidden.grad[mask])
        grads.append(kept_by_token(selected, names))
    assert grads[1] == grads[3]
    torch.testing.assert_close(grads[0], grads[2], rtol=1e-5, atol=1e-7)


def test_nothing_depends_on_what_was_drawn(selected, monkeypatch):
    """Tokens are dense by their expected number: the same ones under every seed, while some that
    are not keep more than the bound."""
    case = make_case(sequences=4, length=16)
    dense, bound = half_are_dense(monkeypatch, Oracle.of(case, keys_of(case)))
    beyond = 0
    for seed in range(6):
        run(case, torch.ones(64), route_seed=seed)
        pairs = selected[-1][0]
        assert torch.equal(selected[-1][1][:64], dense)
        count = torch.bincount(pairs.token, minlength=64)
        count_wanted = _counts(case, seed).masked_fill(dense, 0)
        assert torch.equal(count, count_wanted)
        beyond += int((count > bound).sum())
    assert beyond > 10


def half_are_dense(monkeypatch: pytest.MonkeyPatch, oracle: Oracle) -> tuple[Tensor, float]:
    """(which tokens, the bound of the expected number)"""
    expected = oracle.q.sum(1)
    middle = expected.sort().values[len(expected) // 2 - 1 :][:2]
    bound = float(middle.mean())
    assert float(middle[1] - middle[0]) > 1e-4
    monkeypatch.setattr(triton_routed, "_DENSE_SHARE", bound / oracle.q.shape[1])
    return expected > bound, bound


def _counts(case: Case, seed: int) -> Tensor:
    count, length = case.target.shape
    ids, position = torch.arange(count), torch.arange(length)
    keys = token_keys(seed, ids.repeat_interleave(length), position.repeat(count))
    return Oracle.of(case, keys).kept.sum(1)


@pytest.mark.parametrize("options", [{}, {"route_weight_grad": "exact"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense_tokens_are_exact(monkeypatch, dtype, options):
    case = make_case(sequences=4, length=9, dtype=dtype, bias=True)
    g, e = coefficients(case)
    oracle = Oracle.of(case, keys_of(case))
    dense, _ = half_are_dense(monkeypatch, oracle)
    m = oracle.factors(257, dense)
    wanted = list(oracle.gradients(case, g.double(), e.double(), m))
    if options:
        wanted[1:] = oracle.gradients(case, g.double(), e.double(), torch.ones_like(m))[1:]
    check(run(case, g, e, **options), tuple(wanted), TOLERANCE[dtype])


def test_a_small_tau_is_exact():
    case = make_case()
    g, e = coefficients(case)
    oracle = Oracle.of(case, keys_of(case))
    wanted = oracle.gradients(case, g.double(), e.double(), torch.ones(21, 257).double())
    for tau in (0.0, 1e-12):
        check(run(case, g, e, route_tau=tau), wanted, 2e-6)


@pytest.mark.usefixtures("nothing_dense")
def test_the_same_call_gives_the_same_bits_and_another_seed_others():
    case = make_case(dtype=torch.bfloat16, width=48, bias=True)
    g, e = coefficients(case)
    first, second, other = (run(case, g, e, route_seed=s) for s in (5, 5, 6))
    for a, b, c in zip(first, second, other, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


@pytest.mark.usefixtures("nothing_dense")
def test_runs_of_any_length_give_the_same_gradients(monkeypatch, selected):
    """Shares of dh are formed for a run of tokens at a time."""
    case = make_case(sequences=5, length=15, bias=True)
    g, e = coefficients(case)
    whole = run(case, g, e)
    assert len(selected.pop()[0].runs) == 1
    real = selection.select

    def select(*arguments: Any) -> Any:
        return real(*arguments[:-1], 1)

    monkeypatch.setattr(selection, "select", select)
    parts = run(case, g, e)
    assert len(selected.pop()[0].runs) == 3
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_not_a_number_stays_with_its_token():
    """NaN in a token's state: its own gradient is NaN, as with exact gradients; others' are not."""
    case = make_case()
    hidden = case.hidden.clone()
    hidden[1, 2, 3] = torch.nan
    dh, _, _ = run(replace(case, hidden=hidden), torch.ones(21))
    bad = dh.isnan().any(2)
    assert bool(bad[1, 2])
    assert int(bad.sum()) == 1


@pytest.mark.usefixtures("nothing_dense")
@pytest.mark.parametrize("options", [{}, {"route_weight_grad": "exact"}], ids=str)
def test_nothing_sends_anything_back(options):
    for grad in run(make_case(bias=True), torch.zeros(21), **options):
        assert grad is not None
        assert not grad.any()


def test_nothing_counts():
    case = replace(make_case(), target=torch.full((3, 7), -100))
    for grad in run(case, torch.ones(21))[:2]:
        assert grad is not None
        assert not grad.any()


@pytest.mark.parametrize("counts", [[0, 5, 0, 8, 1], [16], [0, 0, 0], [1] * 9, [7, 9, 8]], ids=str)
def test_blocks_of_pairs_hold_each_pair_once(counts):
    tile = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()
    items = pair_kernels.Items.of(tile, 100, len(counts), 8)
    seen = []
    for j, first, last in zip(items.tile, items.first, items.last, strict=True):
        pairs = range(int(first), min(int(first) + 8, int(last)))
        assert all(int(tile[p - 100]) == int(j) for p in pairs)
        seen += pairs
    assert seen == list(range(100, 100 + len(tile)))


def test_runs_hold_as_many_blocks_as_fit():
    ends = [3, 3, 9, 10, 30, 31]
    runs = list(selection._runs(ends, 7))
    assert runs == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert list(selection._runs(ends, 100)) == [(0, 6)]


# --- what it cannot do ---------------------------------------------------------------------------


def test_fixed_shapes_are_refused():
    case = make_case()
    with pytest.raises(ValueError, match=r"compact=False.*routed"):
        run(case, torch.ones(21), compact=False)
    run(case, torch.ones(21), compact=False, route_tau=0.0)  # exact


def test_a_route_is_of_its_tokens():
    route = Route(TAU, SEED, torch.arange(5))
    assert route[1:3].keys.tolist() == [1, 2]


@pytest.mark.usefixtures("nothing_dense")
def test_under_torch_compile():
    case = make_case(sequences=2, length=6, width=16)
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()

    def loss(ids: Tensor) -> Tensor:
        return grpo_loss(
            hidden,
            weight,
            case.target,
            torch.ones(2),
            backend="triton",
            backward="routed",
            route_tau=TAU,
            route_seed=SEED,
            sequence_ids=ids,
        ).loss

    names = torch.tensor([7, 2**40])
    expected = torch.autograd.grad(loss(names), [hidden, weight])
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(names), [hidden, weight])
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
