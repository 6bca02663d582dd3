"""What a run is: model, data, seeds, options, versions; which checkpoint it may go on from."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import platform
import sys
from pathlib import Path
from typing import Any

from torch import nn

from fused_grpo.integrations.models import causal_lm
from fused_grpo.trainer import checkpoints, setup
from fused_grpo.trainer.rows import Rows
from fused_grpo.trainer.secrecy import command_without_secrets

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
PACKAGES = ("fused-grpo", "torch", "transformers", "accelerate", "safetensors", "numpy", "peft")

# what a resumed run must share with its checkpoint, and why
IDENTITY = {
    "model": "the weights that the checkpoint belongs to",
    "base_weights": "the reference, or what the adapter is added to",
    "dataset": "the prompts that were used already are skipped by number",
    "seed": "the order of the prompts",
    "data_seed": "the order of the prompts",
    "shuffle_dataset": "the order of the prompts",
}
# where a checkpoint inside a generation, or of another process, no longer fits
SHAPE = (
    "world_size",
    "num_generations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
)
# options that change nothing in what is learnt
SILENT = (
    *("output_dir", "logging", "log_", "save", "load_best", "report", "run_name", "resume"),
    *("disable_tqdm", "hub", "push", "eval", "per_device_eval", "do_", "metric_for", "greater"),
    *("project", "trackio", "include", "dataloader", "skip_memory", "debug", "torch_empty"),
    *("server_", "vllm_server", "sglang_server", "weight_sync_dir"),
    *("ddp", "use_cpu", "model_init_kwargs", "max_failed", "max_nonfinite"),
    *("progress", "run_warning", "num_completions"),
)


def describe(model: dict[str, Any], dataset: Any, args: Any, rewards: list[str]) -> dict[str, Any]:
    """{"identity", "shape", "config", "versions"} of a run, as JSON."""
    config = json.loads(args.to_json_string())
    identity = {
        **model,
        "dataset": _dataset_in_words(dataset),
        "seed": args.seed,
        "data_seed": args.data_seed,
        "shuffle_dataset": args.shuffle_dataset,
    }
    return {
        "identity": identity,
        "shape": {name: getattr(args, name) for name in SHAPE},
        "config": {**config, "reward_funcs": rewards},
        "versions": versions(),
    }


def model_identity(model: nn.Module, needs_base: bool) -> dict[str, Any]:
    """Class and size of a model, and a sample of those weights that training does not move.

    needs_base: whether such weights matter: under an adapter, or as the reference.
    """
    size = sum(p.numel() for p in model.parameters())
    dtype = next(model.parameters()).dtype
    words = f"{type(causal_lm(model)).__name__} with {size:,} parameters in {dtype}"
    if not needs_base:
        return {"model": words, "base_weights": None}
    adapted, digest = setup.is_peft(model), hashlib.sha256()
    for parameter in model.parameters():
        if adapted and parameter.requires_grad:
            continue
        if parameter.device.type == "meta":
            return {"model": words, "base_weights": None}
        sample = parameter.detach().flatten()[:16].float().cpu()
        digest.update(sample.numpy().tobytes())
    return {"model": words, "base_weights": digest.hexdigest()[:16]}


def versions() -> dict[str, str]:
    """Of the packages that have a say, of Python and of the machine."""
    found = {"python": platform.python_version(), "machine": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def differences(saved: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(what forbids going on from a checkpoint, what has merely changed), in words."""
    old, new = saved["identity"], now["identity"]
    refused = [
        f"{name}: {old[name]} in the checkpoint, {new[name]} now ({why})"
        for name, why in IDENTITY.items()
        if old[name] != new[name]
        and not (name == "base_weights" and None in (old[name], new[name]))
    ]
    changed = []
    for part in ("shape", "config", "versions"):
        before, after = saved[part], now[part]
        changed += [
            f"{name}: {before.get(name)} -> {after.get(name)}"
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name) and not _is_silent(name, part)
        ]
    return refused, list(dict.fromkeys(changed))


def run_record(about: dict[str, Any]) -> dict[str, Any]:
    """What `run.json` holds."""
    return {**about, "command": command_without_secrets(sys.argv)}


def _is_silent(name: str, part: str) -> bool:
    return part == "config" and (name.startswith(SILENT) or name in IDENTITY)


def _dataset_in_words(dataset: Any) -> str | None:
    """Its length and a digest of up to 64 prompts from all over it."""
    if dataset is None:
        return None
    rows, size = Rows("train_dataset", dataset), len(dataset)
    digest = hashlib.sha256()
    for i in range(min(size, 64)):
        prompt = rows[i * size // min(size, 64)]["prompt"]
        digest.update(json.dumps(prompt, sort_keys=True, default=str).encode())
    return f"{size} prompts, {digest.hexdigest()[:16]}"


# ---- which checkpoint to go on from --------------------------------------------------------------


def find(run_dir: Path, asked: Any, about: dict[str, Any]) -> Path | None:
    """The checkpoint to resume from; None: the run begins.

    Args:
        run_dir: the output directory.
        asked: True for its last good checkpoint, or to begin if there is none; a folder; None.
        about: what `describe` says of this run.

    Raises:
        BrokenCheckpointError: what was asked for, or all that is there, is damaged.
        ValueError: it belongs to another run.
    """
    if asked is True:
        found = _last(run_dir)
    elif asked:
        given = Path(asked)
        found = _named(given.resolve() if given.is_symlink() else given)
    else:
        found = None
        if checkpoints.complete(run_dir):
            logger.warning(
                "%s has checkpoints of an earlier run, which this one does not continue: "
                "resume_from_checkpoint=True would",
                run_dir,
            )
    if found is not None:
        _check(found, about)
    return found


def _last(run_dir: Path) -> Path | None:
    found, problems = checkpoints.last_good(run_dir)
    for problem in problems:
        logger.warning("passed over: %s", problem)
    if found is None and problems:
        raise checkpoints.BrokenCheckpointError(
            f"{run_dir} has no checkpoint to resume from: {'; '.join(problems)}. Without "
            "resume_from_checkpoint the run begins anew"
        )
    if found is None:
        logger.warning("no checkpoint in %s yet: starting from the beginning", run_dir)
    return found


def _named(folder: Path) -> Path:
    problems = checkpoints.problems_of(folder)
    if problems:
        other, _ = checkpoints.last_good(folder.parent)
        raise checkpoints.BrokenCheckpointError(
            f"{'; '.join(problems)}. The last good checkpoint there: {other or 'none'}"
        )
    return folder


def _check_state(path: Path) -> None:
    """BrokenCheckpointError unless it is what the Trainer goes on from; its step names folders."""
    try:
        step = json.loads(path.read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise checkpoints.BrokenCheckpointError(f"{path} is damaged: {error}") from error
    if type(step) is not int or step < 0:
        raise checkpoints.BrokenCheckpointError(f"{path} is damaged: its step is {step!r}")


def _check(folder: Path, about: dict[str, Any]) -> None:
    manifest = checkpoints.read_manifest(folder)
    if not manifest["resumable"]:
        raise ValueError(f"{folder} holds the model only: it was saved with save_only_model")
    _check_state(folder / "trainer_state.json")
    refused, changed = differences(manifest["run"], about)
    if refused:
        raise ValueError(
            f"{folder} belongs to another run: {'; '.join(refused)}. To train its weights in a new "
            "run, give the folder as the model, and another output_dir"
        )
    if changed:
        logger.warning("changed since %s: %s", folder.name, "; ".join(changed))
