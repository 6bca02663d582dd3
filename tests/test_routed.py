"""The routed backward on the torch backend: right on average, bounded in variance, the same for a
seed whatever the batch, and exact where it has to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory_tracker import MemoryTracker
from torch import Tensor

from fused_grpo import GRPOLoss, grpo_loss, linear_logprobs, policy_loss, routed
from fused_grpo.gradients import Chunk
from fused_grpo.memory import Extra, plan_chunks
from fused_grpo.reference import reference_logprobs

VOCAB, WIDTH = 4099, 24
TAU = 2.0**-6
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 6.0, "logit_scale": 1.5},
    "temperature": {"temperature": 0.6},
    "temperatures": {"temperature": "each"},
    "everything": {"bias": True, "softcap": 8.0, "logit_scale": 1.3, "temperature": "each"},
}


def leaves(n: int, head: str = "plain", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """hidden, weight, targets (likely and unlikely ones) and the options of a head."""
    weight = torch.randn(VOCAB, WIDTH) * 2.5 / WIDTH**0.5
    hidden = torch.randn(n, WIDTH)
    targets = torch.distributions.Categorical(logits=hidden @ weight.T).sample()
    targets[::4] = torch.randint(0, VOCAB, targets[::4].shape)
    options = dict(HEADS[head])
    if options.get("bias"):
        options["bias"] = torch.randn(VOCAB).to(dtype)
    if options.get("temperature") == "each":
        options["temperature"] = torch.rand(n) * 0.6 + 0.7
    return {"hidden": hidden.to(dtype), "weight": weight.to(dtype), "targets": targets, **options}


def tile(call: dict[str, Any], copies: int) -> dict[str, Any]:
    """The same tokens `copies` times, as sequences of their own: one batch draws many times."""
    out = dict(call)
    for name in ("hidden", "targets", "temperature"):
        value = out.get(name)
        if isinstance(value, Tensor):
            out[name] = value.expand(copies, *value.shape)
    return out


def exact_gradients(call: dict[str, Any], g: Tensor, e: Tensor | None) -> dict[str, Tensor]:
    """fp64, by autograd through the full logits."""
    wide = {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in call.items()
    }
    names = [k for k in ("hidden", "weight", "bias") if k in wide]
    for name in names:
        wide[name].requires_grad_()
    targets = wide.pop("targets")
    logps, h = reference_logprobs(
        wide["hidden"], wide["weight"], targets, entropy=True, **_head(wide)
    )
    total = (logps * g.double()).sum()
    if e is not None:
        assert h is not None
        total = total + (h * e.double()).sum()
    return dict(zip(names, torch.autograd.grad(total, [wide[k] for k in names]), strict=True))


def _head(call: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in call.items() if k not in ("hidden", "weight", "targets")}


def routed_gradients(
    call: dict[str, Any], g: Tensor, e: Tensor | None, **options: Any
) -> dict[str, Tensor]:
    leaf = dict(call)
    names = [k for k in ("hidden", "weight", "bias") if k in leaf]
    for name in names:
        leaf[name] = leaf[name].detach().clone().requires_grad_()
    options = {"backward": "routed", "route_tau": TAU, "route_seed": 1, **options}
    out = linear_logprobs(
        leaf["hidden"],
        leaf["weight"],
        leaf["targets"],
        entropy=e is not None,
        **_head(leaf),
        **options,
    )
    total = (out.logps * g).sum()
    if e is not None:
        assert out.entropy is not None
        total = total + (out.entropy * e).sum()
    total.backward()
    return {k: leaf[k].grad for k in names}


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_the_mean_converges_to_the_exact_gradient(head: str, entropy: bool) -> None:
    """dh, dW and db over 48 and 768 draws: the error falls as 1 / sqrt(draws), to a few parts of
    a thousand."""
    n, errors = 16, []
    call = leaves(n, head)
    g = torch.randn(n)
    e = torch.randn(n) * 0.1 if entropy else None
    want = exact_gradients(call, g, e)
    for copies in (48, 768):
        many = tile(call, copies)
        got = routed_gradients(
            many, g.expand(copies, -1), None if e is None else e.expand(copies, -1)
        )
        mean = {k: (v.sum(0) if k == "hidden" else v).double() / copies for k, v in got.items()}
        errors.append({k: ((mean[k] - want[k]).norm() / want[k].norm()).item() for k in want})
    for name in want:
        few, many_ = errors[0][name], errors[1][name]
        assert many_ < 0.01, (name, errors)
        assert 0.15 < many_ / few < 0.42, (name, errors)  # 1 / 4 but for chance


def test_the_variance_stays_below_its_bound() -> None:
    """Var of an entry's p / q is tau p - p^2 below tau, 0 above; dh of a token gathers at most
    2 tau sum_v p_v |W_v|^2 (twice, as neighbours come in groups), and some of that."""
    n, copies = 16, 512
    call = leaves(n)
    many = tile(call, copies)
    got = routed_gradients(many, torch.ones(copies, n), None)["hidden"].double()
    p = (call["hidden"].double() @ call["weight"].double().T).softmax(-1)
    p = p.scatter(1, call["targets"][:, None], 0)
    small = p * (p < TAU)
    norms = call["weight"].double().square().sum(1)
    expected = ((TAU * small - small.square()) * norms).sum(1)
    variance = got.var(0).sum(1)
    assert (variance <= 2 * TAU * (p * norms).sum(1)).all()
    assert (variance > 0.7 * expected).all()
    assert (variance < 2 * expected).all()


def kept_by(call: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> set[Any]:
    """(sequence id, ordinal in it, column, value) of every kept entry."""
    found: list[tuple[slice, routed.Entries]] = []
    original = routed.Gradients.add

    def add(self: Any, span: slice, entries: routed.Entries, *rest: Any) -> None:
        found.append((span, entries))
        original(self, span, entries, *rest)

    monkeypatch.setattr(routed.Gradients, "add", add)
    names = call.pop("names")
    hidden = call["hidden"].clone().requires_grad_()
    weight = call["weight"].clone().requires_grad_()
    out = grpo_loss(hidden, weight, *call["rest"], **call["options"], backward="routed", **options)
    out.loss.backward()
    monkeypatch.undo()
    kept = set()
    for span, entries in found:
        rows = (entries.row + span.start).tolist()
        values = zip(rows, entries.column.tolist(), entries.value.tolist(), strict=True)
        kept |= {(*names[row], column, value) for row, column, value in values}
    assert len(kept) == sum(len(entries.row) for _, entries in found)
    by_name = dict(zip(names, hidden.grad.view(-1, WIDTH)[call["at"]], strict=True))
    return {"kept": kept, "dh": by_name, "dw": weight.grad}


def layouts(dtype: torch.dtype, spread: float) -> dict[str, Any]:
    """One batch of 5 sequences: padded, in another order with more padding, packed."""
    lengths, ids = [7, 1, 12, 5, 9], [40, 3, 17, 99, 2**40 + 5]
    weight = (torch.randn(VOCAB, WIDTH) * spread / WIDTH**0.5).to(dtype)
    hidden = [torch.randn(n, WIDTH).to(dtype) for n in lengths]
    targets = [torch.randint(0, VOCAB, (n,)) for n in lengths]
    advantages = torch.randn(5)

    def padded(order: list[int], left: int, width: int) -> dict[str, Any]:
        h, t = torch.randn(5, width, WIDTH).to(dtype), torch.randint(0, VOCAB, (5, width))
        mask = torch.zeros(5, width, dtype=torch.bool)
        for row, s in enumerate(order):
            here = slice(left, left + lengths[s])
            h[row, here], t[row, here], mask[row, here] = hidden[s], targets[s], True
        names = [(ids[s], i) for s in order for i in range(lengths[s])]
        options = {"completion_mask": mask, "sequence_ids": torch.tensor([ids[s] for s in order])}
        return {
            "hidden": h,
            "weight": weight,
            "rest": (t, advantages[order]),
            "names": names,
            "options": options,
            "at": mask.view(-1),
        }

    order = [3, 0, 4, 1, 2]
    names = [(ids[s], i) for s in order for i in range(lengths[s])]
    cu = torch.tensor([0, *torch.tensor([lengths[s] for s in order]).cumsum(0).tolist()])
    packed = {
        "hidden": torch.cat([hidden[s] for s in order]),
        "weight": weight,
        "names": names,
        "rest": (torch.cat([targets[s] for s in order]), advantages[order]),
        "options": {"cu_seqlens": cu, "sequence_ids": torch.tensor([ids[s] for s in order])},
        "at": slice(None),
    }
    return {
        "padded": lambda: padded([0, 1, 2, 3, 4], 0, 12),
        "reordered": lambda: padded([4, 2, 0, 1, 3], 5, 20),
        "packed": lambda: dict(packed),
    }


@pytest.mark.parametrize("spread", [1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_kept_depends_on_the_token_alone(
    dtype: torch.dtype, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order, padding, packing and chunks of 16 tokens: the same entries with the same values, bit
    for bit, and gradients to 1e-5."""
    cases = layouts(dtype, spread)
    options = {"route_tau": TAU, "route_seed": 5}
    whole = kept_by(cases["padded"](), monkeypatch, **options)
    assert len(whole["kept"]) > 34
    tolerance = {torch.bfloat16: 0.01}.get(dtype, 1e-5)
    for layout in cases:
        for chunk_bytes in (None, 700_000):
            other = kept_by(cases[layout](), monkeypatch, chunk_bytes=chunk_bytes, **options)
            assert other["kept"] == whole["kept"], (layout, chunk_bytes)
            for name, dh in whole["dh"].items():
                assert (other["dh"][name] - dh).norm() <= tolerance * dh.norm(), (layout, name)
            assert (other["dw"] - whole["dw"]).norm() < tolerance * whole["dw"].norm()
    another = kept_by(cases["padded"](), monkeypatch, route_tau=TAU, route_seed=6)
    assert another["kept"] != whole["kept"]


def test_chunks_of_16_tokens_are_what_the_small_budget_gives() -> None:
    plan = plan_chunks(700_000, VOCAB, WIDTH, 4, 4, Extra(groups=True), 34)
    assert plan.tokens == 16


def test_the_same_call_gives_the_same_bits() -> None:
    call, g = leaves(40), torch.randn(40)
    first, second = (routed_gradients(call, g, None) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name])


def test_without_a_seed_torchs_generator_decides() -> None:
    call, g = leaves(40), torch.randn(40)
    torch.manual_seed(3)
    first = routed_gradients(call, g, None, route_seed=None)["hidden"]
    second = routed_gradients(call, g, None, route_seed=None)["hidden"]
    torch.manual_seed(3)
    again = routed_gradients(call, g, None, route_seed=None)["hidden"]
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


@pytest.mark.parametrize("head", HEADS)
def test_tau_0_is_the_exact_path(head: str) -> None:
    call, g, e = leaves(20, head), torch.randn(20), torch.randn(20)
    zero = routed_gradients(call, g, e, route_tau=0)
    exact = routed_gradients(call, g, e, backward="exact", route_tau=None, route_seed=None)
    for name in exact:
        assert torch.equal(zero[name], exact[name])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("entropy", [False, True])
def test_small_tau_comes_to_the_exact_gradient(head: str, entropy: bool) -> None:
    """Rows that keep much are dense; rows that do not keep what matters."""
    call, g = leaves(20, head), torch.randn(20)
    e = torch.randn(20) if entropy else None
    want = exact_gradients(call, g, e)
    got = routed_gradients(call, g, e, route_tau=1e-10)
    for name in want:
        assert (got[name] - want[name]).norm() < 2e-5 * want[name].norm(), name


def test_every_seed_has_noise_of_its_own() -> None:
    """Of one vector for all seeds the mean over seeds would stay off by its mean's error."""
    keys = torch.arange(50)
    a, again, b = (routed._windows(routed.Route(TAU, seed, keys), 65) for seed in (1, 1, 2))
    assert torch.equal(a, again)
    assert (a == b).float().mean() < 1e-3


def test_dense_rows_are_chosen_before_anything_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat rows at a small tau, peaked rows beside them; whatever the noise says, the same rows."""
    call = leaves(30)
    call["hidden"][::3] *= 0.05  # flat
    dense = []
    original = routed._entries

    def entries(chunk: Chunk, *rest: Any) -> routed.Entries:
        out = original(chunk, *rest)
        dense.append(out.dense[:30].clone())
        return out

    monkeypatch.setattr(routed, "_entries", entries)
    want = exact_gradients(call, torch.ones(30), None)["hidden"]
    for seed in range(3):
        got = routed_gradients(call, torch.ones(30), None, route_tau=2.0**-11, route_seed=seed)
        rows = dense[-1]
        assert torch.equal(rows, dense[0])
        assert rows[::3].all()
        assert not rows.all()
        error = (got["hidden"] - want).norm(dim=1) / want.norm(dim=1)
        assert (error[rows] < 1e-5).all()
        assert (error[~rows] > 1e-4).all()
    for noise in (1e-9, 1 - 2.0**-25):  # everything is kept, or as little as can be
        monkeypatch.setattr(routed, "_uniform", lambda s, t, n, d, x=noise: torch.full((n,), x))
        routed_gradients(call, torch.ones(30), None, route_tau=2.0**-11)
        assert torch.equal(dense[-1], dense[0])


def test_the_weight_of_an_entry_does_not_depend_on_what_else_is_kept() -> None:
    """Capping or rescaling by the realised count is biased: with two entries of 0.2 and tau 1, the
    mean of what a token sends back must be 0.2 each, over draws in which 0, 1 or 2 are kept."""
    copies = 8192
    weight = torch.full((VOCAB, 1), -40.0)
    weight[7], weight[3000], weight[9] = 0.0, 0.0, torch.tensor(3.0).log()
    call = {
        "hidden": torch.ones(copies, 1, 1),
        "weight": weight,
        "targets": torch.full((copies, 1), 9),
        "bias": torch.zeros(VOCAB),
    }
    got = routed_gradients(call, torch.ones(copies, 1), None, route_tau=1.0)["bias"] / copies
    deviation = (0.2 * 0.8 / copies) ** 0.5
    assert abs(got[7] + 0.2) < 4 * deviation
    assert abs(got[3000] + 0.2) < 4 * deviation
    assert abs(got[9] - 0.4) < 1e-4  # a sum of 8,192 in fp32


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("needs", ["both", "hidden", "weight"])
@pytest.mark.parametrize("weight_grad", ["routed", "exact"])
def test_losses_agree_with_their_log_probs(weight_grad: str, needs: str, level: str) -> None:
    """grpo_loss, one pass whatever the objective: values are those of exact gradients, gradients
    those of linear_logprobs with the same noise and the loss's own g."""
    call = leaves(36)
    shape = (3, 12)
    old = linear_logprobs(call["hidden"], call["weight"], call["targets"]).logps.view(shape)
    old = old + torch.randn(shape) * 0.2
    hidden, weight = (
        call[k].clone().requires_grad_(needs in ("both", k)) for k in ("hidden", "weight")
    )
    targets, advantages = call["targets"].view(shape), torch.tensor([1.0, -0.5, 2.0])

    def run(**options: Any) -> Any:
        return grpo_loss(
            hidden.view(3, 12, WIDTH),
            weight,
            targets,
            advantages,
            old_per_token_logps=old,
            importance_sampling_level=level,
            entropy_coef=0.01,
            chunk_bytes=700_000,
            **options,
        )

    options = {
        "backward": "routed",
        "route_tau": TAU,
        "route_seed": 1,
        "route_weight_grad": weight_grad,
    }
    out, exact = run(**options), run()
    torch.testing.assert_close(out.loss, exact.loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(out.per_token_logps, exact.per_token_logps, rtol=1e-5, atol=1e-6)
    out.loss.backward()
    per_token = run(reduction="none", **options)
    torch.testing.assert_close(per_token.loss.mean(), exact.loss, rtol=1e-5, atol=1e-7)
    leaf = [x.detach().clone().requires_grad_(x.requires_grad) for x in (hidden, weight)]
    values = linear_logprobs(leaf[0].view(3, 12, WIDTH), leaf[1], targets, entropy=True, **options)
    logps, h = values.logps.detach().requires_grad_(), values.entropy.detach().requires_grad_()
    policy_loss(
        logps,
        advantages,
        entropies=h,
        old_per_token_logps=old,
        importance_sampling_level=level,
        entropy_coef=0.01,
    ).loss.backward()
    torch.autograd.backward([values.logps, values.entropy], [logps.grad, h.grad])
    for x, y in zip((hidden, weight), leaf, strict=True):
        assert (x.grad is None) == (y.grad is None)
        if x.grad is not None:
            assert (x.grad - y.grad).norm() < 1e-4 * y.grad.norm()


@pytest.mark.parametrize("entropy", [False, True])
def test_an_exact_weight_gradient_beside_a_routed_trunk(entropy: bool) -> None:
    call, g = leaves(50, "everything"), torch.randn(50)
    e = torch.randn(50) * 0.1 if entropy else None
    want = exact_gradients(call, g, e)
    mixed = routed_gradients(call, g, e, route_weight_grad="exact", chunk_bytes=700_000)
    sparse = routed_gradients(call, g, e, chunk_bytes=700_000)
    torch.testing.assert_close(mixed["hidden"], sparse["hidden"], rtol=1e-4, atol=1e-6)
    for name in ("weight", "bias"):
        error, of_sparse = (
            (x[name] - want[name]).norm() / want[name].norm() for x in (mixed, sparse)
        )
        assert error < 1e-5
        assert of_sparse > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    """Gradients come in the leaves' dtypes; at tau 2^-9 noise is a few percent in each."""
    call, g = leaves(64, dtype=dtype), torch.randn(64)
    want = exact_gradients(call, g, None)
    got = routed_gradients(call, g, None, route_tau=2.0**-9)
    for name in want:
        assert got[name].dtype == dtype
        assert 1e-3 < (got[name].double() - want[name]).norm() / want[name].norm() < 0.1


def test_nan_is_seen() -> None:
    call, g = leaves(20), torch.ones(20)
    call["hidden"][4] = torch.nan
    got = routed_gradients(call, g, None)
    assert got["hidden"][4].isnan().all()
    assert not got["hidden"][[3, 5]].isnan().any()
    assert got["weight"].isnan().all()


def test_tokens_that_cannot_learn_send_nothing() -> None:
    call, g = leaves(20), torch.ones(20)
    g[::2] = 0
    got = routed_gradients(call, g, None)
    assert not got["hidden"][::2].any()
    some = {**call, "hidden": call["hidden"][1::2], "targets": call["targets"][1::2]}
    nothing = routed_gradients(call, torch.zeros(20), None)
    assert not nothing["weight"].any()
    assert routed_gradients(some, g[1::2], None)["hidden"].shape == (10, WIDTH)


def test_nothing_counts() -> None:
    call = leaves(6)
    hidden, weight = (call[k].clone().requires_grad_() for k in ("hidden", "weight"))
    mask = torch.zeros(2, 3, dtype=torch.bool)
    out = grpo_loss(
        hidden.view(2, 3, WIDTH),
        weight,
        call["targets"].view(2, 3),
        torch.ones(2),
        completion_mask=mask,
        backward="routed",
    )
    out.loss.backward()
    assert out.loss == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_metrics_tell_what_was_kept() -> None:
    """The noise that is told is the error of dL/dlogits, which W = identity shows."""
    vocab, n = 4096, 64
    weight = torch.eye(vocab)
    hidden = torch.randn(n, vocab).mul_(1.5).requires_grad_()
    targets = torch.randint(0, vocab, (1, n))
    call = {"advantages": torch.ones(1)}
    grads = {}
    for backward in ("exact", "routed"):
        extra = {"route_tau": 2.0**-8, "route_seed": 2} if backward == "routed" else {}
        out = grpo_loss(hidden[None], weight, targets, **call, backward=backward, **extra)
        (grads[backward],) = torch.autograd.grad(out.loss, hidden)
    error = (grads["routed"] - grads["exact"]).norm() / grads["exact"].norm()
    assert 0.7 < out.metrics["route/relative_noise"] / error < 1.4
    kept = (grads["routed"] != 0).sum() / n
    assert abs(out.metrics["route/kept_per_token"] - kept) <= 1.001  # the target stands apart
    assert out.metrics["route/dense_fraction"] == 0


def test_a_module_takes_the_options_and_pickles_its_noise() -> None:
    call = leaves(12)
    loss = GRPOLoss(backward="routed", route_tau=TAU, route_seed=4)
    hidden = call["hidden"].clone().requires_grad_()
    args = (call["weight"], call["targets"][None], torch.ones(1))
    (first,) = torch.autograd.grad(loss(hidden[None], *args).loss, hidden)
    same = grpo_loss(hidden[None], *args, backward="routed", route_tau=TAU, route_seed=4)
    assert torch.equal(first, torch.autograd.grad(same.loss, hidden)[0])
    (other,) = torch.autograd.grad(loss(hidden[None], *args, route_seed=5).loss, hidden)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"backward": "sparse"}, "backward"),
        ({"route_tau": 0.1}, "route_tau is an option of backward='routed'"),
        ({"route_seed": 1}, "route_seed is an option"),
        ({"route_weight_grad": "exact"}, "route_weight_grad is an option"),
        ({"sequence_ids": torch.zeros(2, dtype=torch.int64)}, "sequence_ids is an option"),
        ({"backward": "routed", "route_tau": -1.0}, "route_tau"),
        ({"backward": "routed", "route_tau": 1.5}, "route_tau"),
        ({"backward": "routed", "route_tau": 1e-30}, "route_tau"),
        ({"backward": "routed", "route_tau": float("nan")}, "route_tau"),
        ({"backward": "routed", "route_seed": 1.5}, "route_seed"),
        ({"backward": "routed", "route_weight_grad": "dense"}, "route_weight_grad"),
        ({"backward": "routed", "sequence_ids": torch.zeros(3, dtype=torch.int64)}, r"\[3\]"),
        ({"backward": "routed", "sequence_ids": torch.zeros(2)}, "sequence_ids"),
        ({"backward": "routed", "backend": "reference"}, "reference"),
        ({"backward": "routed", "support_top_k": 5}, "support_top_k"),
    ],
)
def test_bad_options(options: dict[str, Any], error: str) -> None:
    hidden, weight = torch.randn(2, 3, 8), torch.randn(50, 8)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises((ValueError, TypeError), match=error):
        linear_logprobs(hidden, weight, ids, **options)
    with pytest.raises((ValueError, TypeError), match=error):
        grpo_loss(hidden, weight, ids, torch.ones(2), **options)


def test_the_divergence_over_the_vocabulary_is_refused() -> None:
    hidden, weight = torch.randn(2, 3, 8), torch.randn(50, 8)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="kl_estimator='full'"):
        grpo_loss(
            hidden,
            weight,
            ids,
            torch.ones(2),
            beta=0.1,
            kl_estimator="full",
            ref_hidden=hidden,
            ref_weight=weight,
            backward="routed",
        )


def test_a_reference_head_is_read_in_the_same_pass() -> None:
    call = leaves(24)
    hidden, weight = call["hidden"].view(2, 12, WIDTH).requires_grad_(), call["weight"]
    ids, reference = call["targets"].view(2, 12), torch.randn(2, 12, WIDTH)
    given = {"ref_hidden": reference, "ref_weight": weight, "beta": 0.1}
    ref = linear_logprobs(reference, weight, ids).logps
    grads = []
    for kl in (given, {"ref_per_token_logps": ref, "beta": 0.1}):
        out = grpo_loss(
            hidden,
            weight,
            ids,
            torch.ones(2),
            **kl,
            backward="routed",
            route_tau=TAU,
            route_seed=0,
        )
        grads.append(torch.autograd.grad(out.loss, hidden)[0])
    assert (grads[0] - grads[1]).norm() < 1e-4 * grads[1].norm()


def test_under_torch_compile() -> None:
    call = leaves(24)
    hidden = call["hidden"].view(2, 12, WIDTH).requires_grad_()
    weight = call["weight"].requires_grad_()
    ids, options = call["targets"].view(2, 12), {"backward": "routed", "route_tau": TAU}

    def loss(ids_of_sequences: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out = grpo_loss(
            hidden,
            weight,
            ids,
            torch.ones(2),
            sequence_ids=ids_of_sequences,
            route_seed=3,
            **options,
        )
        return out.loss, out.metrics

    names = torch.tensor([7, 2**40])
    want, metrics = loss(names)
    expected = torch.autograd.grad(want, [hidden, weight])
    torch._dynamo.reset()
    got, found = torch.compile(loss, backend="aot_eager", fullgraph=True)(names)
    for x, y in zip(torch.autograd.grad(got, [hidden, weight]), expected, strict=True):
        assert torch.equal(x, y)
    assert set(found) == set(metrics)
    for name, value in metrics.items():
        torch.testing.assert_close(found[name], value)


def test_entries_are_flushed_when_they_take_too_much_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call, g = leaves(80), torch.randn(80)
    whole = routed_gradients(call, g, None)
    flushes = []
    original = routed.Gradients._flush

    def flush(self: Any) -> None:
        flushes.append(len(self._pending))
        original(self)

    monkeypatch.setattr(routed.Gradients, "_flush", flush)
    parts = routed_gradients(call, g, None, chunk_bytes=20_000)
    assert sum(n > 0 for n in flushes) > 1
    for name in whole:
        assert (parts[name] - whole[name]).norm() < 1e-5 * whole[name].norm()


def test_no_matrix_of_tokens_and_vocabulary_is_held() -> None:
    """Peak memory: exact mode's, and the kept entries."""
    hidden = torch.randn(8, 128, WIDTH, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, requires_grad=True)
    ids = torch.randint(0, VOCAB, (8, 128))
    peaks, kept = {}, 0.0
    budget = 2**22
    for backward in ("exact", "routed"):
        options = {"route_tau": TAU, "route_seed": 0} if backward == "routed" else {}
        with MemoryTracker() as memory:
            out = grpo_loss(
                hidden, weight, ids, torch.ones(8), chunk_bytes=budget, backward=backward, **options
            )
            out.loss.backward()
        peaks[backward] = memory.peak
        kept = float(out.metrics.get("route/kept_per_token", 0)) * 1024
    assert peaks["routed"] < peaks["exact"] + 48 * kept
    assert peaks["routed"] < 1024 * VOCAB * 4 / 2
