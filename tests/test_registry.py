"""Objectives of one's own: registered by name, or named as module:function."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from objective_cases import OBJECTIVES, fused, make
from oracle import close, ours
from torch import Tensor

from fused_grpo import GRPOLoss, LossSpec, TokenView, grpo_loss, policy_loss, register_objective
from fused_grpo.objectives import LOSS_TYPES


def my_dapo(tokens: TokenView, spec: LossSpec) -> Tensor:
    """dapo, written anew."""
    clipped = tokens.ratio.clamp(1 - spec.epsilon_low, 1 + spec.epsilon_low)
    return torch.maximum(-tokens.ratio * tokens.advantages, -clipped * tokens.advantages)


def my_gspo(tokens: TokenView, spec: LossSpec) -> Tensor:
    """gspo, with the sum over the sequence taken here."""
    ratio = tokens.sequence_mean(tokens.logps - tokens.old).exp()
    clipped = ratio.clamp(1 - spec.epsilon_low, 1 + spec.epsilon_low)
    return torch.maximum(-ratio * tokens.advantages, -clipped * tokens.advantages)


def my_bonus(tokens: TokenView, spec: LossSpec) -> Tensor:
    """dapo with an entropy bonus of 0.1 that the function adds itself."""
    assert tokens.entropy is not None
    return my_dapo(tokens, spec) - 0.1 * tokens.entropy


@pytest.fixture(autouse=True)
def _table() -> Iterator[None]:
    """Names added by a test are gone after it."""
    before = dict(LOSS_TYPES)
    yield
    LOSS_TYPES.clear()
    LOSS_TYPES.update(before)


@pytest.mark.parametrize("old", [True, False], ids=["old", "fresh"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    ("function", "locality", "builtin"),
    [(my_dapo, "token", "dapo"), (my_dapo, "batch", "dapo"), (my_gspo, "sequence", "gspo")],
)
def test_own_objective_equals_the_built_in_one(
    function: object, locality: str, builtin: str, layout: str, old: bool
) -> None:
    """Through the head, a few tokens to a chunk, beside a KL and an entropy bonus."""
    scheme = LOSS_TYPES[builtin].scheme
    register_objective("mine", locality=locality, scheme=scheme)(function)  # type: ignore[arg-type]
    extra = {"beta": 0.2, "entropy_coef": 0.1}
    want = fused(make({"loss_type": builtin}, {}, {}, old=old, **extra), layout)
    got = fused(make({"loss_type": "mine"}, {}, {}, old=old, **extra), layout)
    close(got[0], want[0], 1e-12, "loss")
    for name, grad in want[1].items():
        close(got[1][name], grad, 1e-12, name)


@pytest.mark.parametrize("locality", ["token", "batch"])
def test_own_objective_differentiates_entropies(locality: str) -> None:
    register_objective("mine", locality=locality, entropy=True)(my_bonus)
    want = fused(make({}, {}, {}, entropy_coef=0.1))
    got = fused(make({"loss_type": "mine"}, {}, {}))
    close(got[0], want[0], 1e-12, "loss")
    for name, grad in want[1].items():
        close(got[1][name], grad, 1e-12, name)


def test_local_objectives_take_one_pass_and_others_see_everything() -> None:
    """A "token" objective is called a chunk at a time, a "batch" one on all tokens at once."""
    seen: list[int] = []

    def count(tokens: TokenView, spec: LossSpec) -> Tensor:
        seen.append(tokens.logps.numel())
        return my_dapo(tokens, spec)

    for locality in ("token", "batch"):
        register_objective(f"count_{locality}", locality=locality)(count)
        case = make({"loss_type": f"count_{locality}"}, {}, {})
        total = int(case.mask.sum())
        seen.clear()
        fused(case)
        *chunks, for_metrics = seen
        assert for_metrics == total
        assert sum(chunks) == total
        assert (len(chunks) > 1) == (locality == "token")


def test_all_ways_in() -> None:
    register_objective("mine", locality="token")(my_dapo)
    case = make({"loss_type": "mine"}, {}, {})
    want = ours(make({}, {}, {})).output.loss.detach()
    module = GRPOLoss(loss_type="mine")
    tensors = {**case.tensors, "bias": case.bias}
    args = (case.hidden, case.weight, case.ids, case.advantages)
    close(module(*args, **tensors).loss, want, 1e-12, "GRPOLoss")
    with torch.no_grad():
        close(grpo_loss(*args, loss_type="mine", **tensors).loss, want, 1e-12, "no_grad")
    out = grpo_loss(*args, loss_type="mine", reduction="none", **tensors)
    close(out.per_token_loss.sum() / case.mask.sum(), want, 1e-12, "none")
    out = grpo_loss(*args, loss_type="mine", backend="reference", **tensors)
    close(out.loss, want, 1e-12, "reference")


def test_gradient_is_that_of_autograd() -> None:
    def cubic(tokens: TokenView, spec: LossSpec) -> Tensor:
        return tokens.logps**3 * tokens.advantages

    register_objective("cubic", scheme="token_sum")(cubic)
    logps = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    policy_loss(logps, torch.tensor([0.5], dtype=torch.float64), loss_type="cubic").loss.backward()
    assert logps.grad.tolist() == [[1.5, 6.0]]


def test_module_and_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with a colon is imported where it is used first."""
    module = ModuleType("their_losses")
    module.loss = my_dapo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_losses", module)
    case = make({}, {}, {})
    want = ours(case).output.loss
    got = ours(case.with_options(loss_type="their_losses:loss")).output.loss
    close(got, want, 1e-12, "loss")
    LossSpec(loss_type="their_losses:loss", delta=2.0)


def test_module_that_registers_keeps_what_it_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registering_losses.py").write_text(
        "from fused_grpo import register_objective\n\n"
        "@register_objective('theirs', scheme='sequence_mean', locality='token')\n"
        "def loss(tokens, spec):\n    return -tokens.ratio * tokens.advantages\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    case = make({"loss_type": "importance_sampling"}, {"aggregation": "sequence_mean"}, {})
    want = ours(case).output.loss
    case.options = {"loss_type": "registering_losses:loss"}
    close(ours(case).output.loss, want, 1e-12, "loss")
    assert LOSS_TYPES["registering_losses:loss"] is LOSS_TYPES["theirs"]


def test_wrong_registrations() -> None:
    with pytest.raises(ValueError, match="'dapo' exists already"):
        register_objective("dapo")(my_dapo)
    with pytest.raises(ValueError, match="aggregation='mean' is unknown"):
        register_objective("mine", scheme="mean")
    with pytest.raises(ValueError, match="locality='row' is unknown"):
        register_objective("mine", locality="row")
    with pytest.raises(TypeError, match="must be a function"):
        register_objective("mine")(3)  # type: ignore[arg-type]
    register_objective("mine")(my_dapo)
    register_objective("mine", locality="token")(my_dapo)  # a cell run twice
    assert LOSS_TYPES["mine"].locality == "token"
    with pytest.raises(ValueError, match="'mine' exists already"):
        register_objective("mine")(my_gspo)


@pytest.mark.parametrize("result", [lambda t: t.ratio.sum(), lambda t: t.ratio[:-1], lambda t: 1.0])
def test_results_of_another_shape(result: object) -> None:
    register_objective("mine")(lambda tokens, spec: result(tokens))  # type: ignore[operator]
    with pytest.raises(ValueError, match="'mine' must return one loss per token"):
        policy_loss(-torch.ones(2, 3), torch.ones(2), loss_type="mine")


def test_every_row_names_options_that_exist() -> None:
    names = set(LossSpec.__dataclass_fields__)
    for name, row in LOSS_TYPES.items():
        assert row.takes <= names, name
        assert set(row.defaults) <= row.takes, name
        assert set(row.needs) <= row.takes, name
        assert all(getattr(LossSpec, option) is None for option in row.defaults), name
    assert {o.get("loss_type", "dapo") for o in OBJECTIVES.values()} <= set(LOSS_TYPES)
