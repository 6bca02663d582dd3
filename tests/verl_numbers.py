"""Inputs of which verl's results are kept in verl_numbers.json, and the program that computes them.

    VERL_PATH=DIR python tests/verl_numbers.py   # pip install --no-deps --target DIR verl==0.9.1

Inputs come from formulas rather than a random generator, so that they are the same everywhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = Path(__file__).with_suffix(".json")
ROWS, WIDTH, DIM, VOCAB = 4, 6, 5, 11

# loss -> what its configuration differs in from verl's defaults
CONFIGS: dict[str, dict[str, Any]] = {
    "vanilla": {"clip_ratio_high": 0.28, "clip_ratio_c": 1.3},
    "gspo": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08},
    "sapo": {"tau_pos": 1.2, "tau_neg": 0.7},
    "gpg": {},
    "cispo": {"clip_ratio_high": 0.1},
    "dppo_tv": {"clip_ratio": 0.05, "clip_ratio_c": 1.2},
    "dppo_kl": {"clip_ratio": 0.01, "clip_ratio_c": 1.2},
    "clip_cov": {"policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0}},
    "kl_cov": {"policy_loss": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.3}},
    "geo_mean": {"clip_ratio": 0.1},
    "dro": {"policy_loss": {"dro_beta": 0.4}},
}
POLICY = {
    "clip_cov_ratio": 2e-4,
    "clip_cov_lb": 1.0,
    "clip_cov_ub": 5.0,
    "kl_cov_ratio": 2e-4,
    "ppo_kl_coef": 0.1,
    "dro_beta": None,
}
DEFAULTS = {
    "clip_ratio": 0.2,
    "clip_ratio_low": None,
    "clip_ratio_high": None,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
}
RANKS = {"dp_size": 2, "batch_num_tokens": 31, "global_batch_size": 7}
# case -> (loss_agg_mode, global_batch_info, whether there are importance weights)
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "token-mean": ("token-mean", {}, False),
    "weighted": ("token-mean", {}, True),
    "token-mean of 2 ranks": ("token-mean", RANKS, False),
    "token-sum": ("token-sum", RANKS, False),
    "seq-mean-token-sum": ("seq-mean-token-sum", {}, False),
    "seq-mean-token-sum of 2 ranks": ("seq-mean-token-sum", RANKS, True),
    "seq-mean-token-sum-norm": ("seq-mean-token-sum-norm", {}, False),
    "norm by a constant": ("seq-mean-token-sum-norm", {"loss_scale_factor": 9}, False),
    "seq-mean-token-mean": ("seq-mean-token-mean", {"global_batch_size": 5}, False),
}


def wave(*shape: int, step: float, scale: float = 1.0) -> Tensor:
    """Numbers that look irregular: scale * sin(step i^2)."""
    i = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64)
    return (scale * torch.sin(step * i * i)).reshape(shape)


def loss_inputs() -> dict[str, Tensor]:
    """The arguments of a policy loss, float64; rows of different lengths, the last one empty."""
    log_prob = -wave(ROWS, WIDTH, step=0.7).abs() - 0.1
    mask = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    mask[0, 1] = mask[1, 4:] = mask[2, 3:] = mask[3] = 0
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    return {
        "old_log_prob": (log_prob - wave(ROWS, WIDTH, step=1.3, scale=0.4)).clamp(max=-0.01),
        "log_prob": log_prob,
        "advantages": (sign * torch.tensor([0.5, 1.2, 0.9, 0.3])).double()[:, None].expand(4, 6),
        "response_mask": mask,
        "rollout_is_weights": wave(ROWS, WIDTH, step=0.9, scale=0.3).exp(),
    }


def config(name: str, info: dict[str, Any]) -> dict[str, Any]:
    """The actor's configuration, as nested dictionaries."""
    given = CONFIGS[name]
    policy = POLICY | given.get("policy_loss", {})
    return DEFAULTS | given | {"policy_loss": policy, "global_batch_info": info}


def head_inputs() -> dict[str, Tensor]:
    """Of a head, float32: hidden states, weight, ids, and upstream gradients of both outputs."""
    return {
        "hidden": wave(ROWS, WIDTH, DIM, step=0.31, scale=1.5).float(),
        "weight": wave(VOCAB, DIM, step=0.53, scale=1.2).float(),
        "ids": torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) * 7 % VOCAB,
        "dlogp": wave(ROWS, WIDTH, step=0.77).float(),
        "dentropy": wave(ROWS, WIDTH, step=0.41, scale=0.5).float(),
    }


def run_head(head: Any, temperature: float, packed: bool) -> dict[str, Tensor]:
    """Outputs and gradients of a module that is called as verl's."""
    x = head_inputs()
    hidden, weight = x["hidden"].requires_grad_(), x["weight"].requires_grad_()
    given = (hidden.flatten(0, 1), x["ids"].flatten()) if packed else (hidden, x["ids"])
    logps, entropy = head(given[0], weight, given[1], temperature)
    shape = logps.shape
    torch.autograd.backward(
        (logps, entropy), (x["dlogp"].reshape(shape), x["dentropy"].reshape(shape))
    )
    grads = {"dhidden": hidden.grad, "dweight": weight.grad}
    return {"logps": logps.detach().flatten(), "entropy": entropy.detach().flatten()} | grads  # type: ignore[return-value]


def run_loss(function: Any, case: str, options: Any) -> dict[str, Any]:
    """Loss, metrics and dL/dlog_prob of a function that is called as verl's."""
    mode, _, weighted = CASES[case]
    x = loss_inputs()
    weights = x.pop("rollout_is_weights")
    log_prob = x.pop("log_prob").requires_grad_()
    loss, metrics = function(
        log_prob=log_prob,
        loss_agg_mode=mode,
        config=options,
        rollout_is_weights=weights if weighted else None,
        **x,
    )
    loss.backward()
    assert log_prob.grad is not None
    return {"loss": float(loss.detach()), "metrics": metrics, "grad": log_prob.grad.flatten()}


def main() -> None:
    from peers import VERL_PATH, _module, verl

    core, _ = verl()

    def nested(options: dict[str, Any]) -> Any:
        return core.Config({k: nested(v) if k == "policy_loss" else v for k, v in options.items()})

    def rounded(values: Any) -> Any:
        if isinstance(values, Tensor):
            return [float(f"{v:.10g}") for v in values.double().flatten().tolist()]
        if isinstance(values, dict):
            return {k: rounded(v) for k, v in values.items()}
        return float(f"{values:.12g}")

    losses = {
        name: {
            case: rounded(run_loss(core.get_policy_loss_fn(name), case, nested(config(name, info))))
            for case, (_, info, _) in CASES.items()
        }
        for name in CONFIGS
    }
    functional = _module("f", VERL_PATH / "utils/experimental/torch_functional.py")
    head = functional.FusedLinearForPPO(chunk_size=8)
    heads = {str(t): rounded(run_head(head, t, packed=False)) for t in (1.0, 0.6)}
    text = json.dumps({"verl": "0.9.1", "losses": losses, "heads": heads}, indent=0)
    FILE.write_text(text.replace(",\n", ", ").replace("}, ", "},\n") + "\n")


if __name__ == "__main__":
    main()
