"""`SavingTrainer`: a `transformers.Trainer` whose checkpoints are whole or not there.

The Trainer still saves and loads model, optimizer, scheduler and random states, for one process or
many; here that happens in a draft, beside what a resumed run needs to continue bit for bit.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from fused_grpo.trainer import checkpoints
from fused_grpo.trainer.loading import check_adapter, check_shards, plain
from fused_grpo.trainer.metrics import METRICS_FILE
from fused_grpo.trainer.nonfinite import StepWatch
from fused_grpo.trainer.state import load_state, save_state

logger = logging.getLogger(__name__)
T = TypeVar("T")

SHARED_STATE = "run_state.safetensors"
PROCESS_STATE = "process_state_{}.safetensors"


class SaveError(OSError):
    """Too many checkpoints in a row could not be written."""


class SavingTrainer(Trainer):
    """See the module. What subclasses hold beside the Trainer, they say in the methods below."""

    args: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.watch = StepWatch()
        self._failed_saves = 0
        self._resumed_from: set[Path] = set()  # the folder of the checkpoint, if there is one
        self._saving: Path | None = None  # where the Trainer is writing a checkpoint now
        self._about: dict[str, Any] = {}

    # ---- what there is to save ------------------------------------------------------------------

    def shared_state(self) -> dict[str, Any]:
        """What all processes have in common, beside what the Trainer saves."""
        return {}

    def process_state(self) -> dict[str, Any]:
        """What each process has of its own."""
        return {}

    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Takes what `shared_state` gave."""

    def load_process_state(self, state: dict[str, Any], same_shape: bool) -> None:
        """Takes what `process_state` gave; `same_shape`: batches still have the same rows."""

    def run_about(self) -> dict[str, Any]:
        """What `identity.describe` says of this run."""
        raise NotImplementedError

    def _on_main(self, func: Callable[[], T]) -> T:
        """What `func` gives on the main process, or what it raises, on every process."""
        result: list[Any] = [None, None]
        if self.is_world_process_zero():
            try:
                result[0] = func()
            except (ValueError, OSError) as error:
                result[1] = error
        if self.args.world_size > 1:
            broadcast_object_list(result)
        if result[1] is not None:
            raise result[1]
        return result[0]

    # ---- saving ---------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._saving or super()._get_output_dir(trial))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._saving is None:  # else it is pushed when it is there
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run_dir = Path(super()._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        best = self.state.best_model_checkpoint
        failed = self._tried(lambda: self._begin_draft(run_dir))
        self.accelerator.wait_for_everyone()
        draft = run_dir / checkpoints.SAVING / name
        finite = self._is_finite(model)
        if failed is None:
            failed = self._tried(lambda: self._write(model, trial, run_dir, draft))
        if failed is None:
            failed = self._tried(lambda: self._publish(draft, run_dir, finite))
        if failed is not None:
            self.state.best_model_checkpoint = best
            self._save_failed(run_dir, name, failed)
            return
        self._failed_saves = 0
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run_dir / name))

    def _begin_draft(self, run_dir: Path) -> None:
        if self.args.should_save:
            checkpoints.draft_root(run_dir)

    def _is_finite(self, model: nn.Module) -> bool:
        """Whether what training moves is, on all processes: else it is nothing to go on from."""
        optimizer: Any = self.optimizer
        moments = [t for state in getattr(optimizer, "state", {}).values() for t in state.values()]
        moved = [p.detach() for p in model.parameters() if p.requires_grad]
        moved += [t for t in moments if isinstance(t, Tensor) and t.is_floating_point()]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in moved]
        bad = torch.tensor([float(not all(bool(t.isfinite().all()) for t in local))])
        if self.args.world_size > 1:
            bad = self.accelerator.gather(bad.to(self.args.device))
        if bad.any() and self.is_world_process_zero():
            logger.warning(
                "step %d: weights or the optimizer's moments are not finite; what is saved now is "
                "kept apart, and a resumed run goes on from before",
                self.state.global_step,
            )
        return not bool(bad.any())

    def _write(self, model: nn.Module, trial: Any, run_dir: Path, draft: Path) -> None:
        """All files of a checkpoint, those of this process, into `draft`."""
        state, self._saving = self.state, draft.parent
        best, state.best_global_step = state.best_global_step, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saving, state.best_global_step = None, best
        if not self.args.save_only_model:
            save_state(draft / PROCESS_STATE.format(self.args.process_index), self._own_state())
        shared = self.shared_state()  # by all processes: it may have to be gathered
        if not self.args.should_save:
            return
        # the Trainer looks for the best checkpoint where this one is written, not where it will be
        if best and (best == state.global_step or (run_dir / f"checkpoint-{best}").is_dir()):
            state.best_model_checkpoint = str(run_dir / f"checkpoint-{best}")
        state.save_to_json(str(draft / "trainer_state.json"))
        if not self.args.save_only_model:
            save_state(draft / SHARED_STATE, shared)
        if (run_dir / METRICS_FILE).is_file():
            shutil.copy(run_dir / METRICS_FILE, draft / METRICS_FILE)

    def _publish(self, draft: Path, run_dir: Path, finite: bool) -> None:
        if not self.args.should_save:
            return
        about = {
            "step": self.state.global_step,
            "resumable": not self.args.save_only_model,
            "finite": finite,
            "run": self._about,
        }
        final = checkpoints.publish(draft, run_dir, about)
        best = self.state.best_model_checkpoint
        keep = [final, *([Path(best)] if best else [])]
        checkpoints.rotate(run_dir, self.args.save_total_limit, keep)

    def _tried(self, func: Callable[[], None]) -> str | None:
        """None, or why a process could not write; all processes get the same answer."""
        problem = None
        try:
            func()
        except Exception as error:
            if not checkpoints.is_write_error(error):
                raise
            if self.is_fsdp_enabled:  # the others wait for this one in the middle of a shard
                raise
            problem = f"{type(error).__name__}: {error}"
        if self.args.world_size > 1:
            problem = next((p for p in gather_object([problem]) if p is not None), None)
        return problem

    def _save_failed(self, run_dir: Path, name: str, problem: str) -> None:
        self._failed_saves += 1
        if self.args.should_save:
            shutil.rmtree(run_dir / checkpoints.SAVING, ignore_errors=True)
        good = checkpoints.latest(run_dir)
        there = next(path for path in (run_dir, *run_dir.absolute().parents) if path.is_dir())
        free = shutil.disk_usage(there).free / 2**20
        words = (
            f"{name} could not be saved ({problem}; {free:,.0f} MiB are free in {run_dir}). The "
            f"last good checkpoint is {good.name if good else 'none'}"
        )
        if self._failed_saves >= self.args.max_failed_saves:
            raise SaveError(f"{words}; {self._failed_saves} failed in a row, so the run stops")
        if self.is_world_process_zero():
            logger.warning("%s; the run goes on", words)

    def _own_state(self) -> dict[str, Any]:
        loop = {
            "loss": float(self._tr_loss),
            "last_logged": self._globalstep_last_logged,
            "skipped": self.watch.skipped,
            "in_a_row": self.watch.in_a_row,
        }
        return {"loop": loop, "own": self.process_state()}

    # ---- loading --------------------------------------------------------------------------------

    def _load_callback_state(self) -> None:
        """Called when `self.state` has come from the checkpoint's JSON, which may say anything."""
        self.state.best_model_checkpoint = self._best_of(self.state.best_model_checkpoint)
        exporting = {
            type(part).__name__
            for part in (*self.callback_handler.callbacks, self.control)
            if isinstance(part, ExportableState)
        }
        state: Any = self.state  # a dict of what callbacks exported, at this point
        stored = state.stateful_callbacks or {}
        state.stateful_callbacks = {k: v for k, v in stored.items() if k in exporting}
        super()._load_callback_state()

    def _best_of(self, said: str | None) -> str | None:
        """A checkpoint of this run, or of the one it goes on from; its weights may be loaded."""
        if said is None:
            return None
        name = Path(said).name
        for folder in (Path(self.args.output_dir), *self._resumed_from):
            near = folder / name
            if checkpoints.is_name(name) and near.is_dir() and not near.is_symlink():
                return str(near)
        logger.warning(
            "the best checkpoint, %s, is not of this run: it is left out of account", said
        )
        return None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        check_adapter(resume_from_checkpoint)
        check_shards(Path(resume_from_checkpoint))
        with plain(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        with plain(self.state.best_model_checkpoint):
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        optimizer: Any = self.optimizer
        fresh = [_options(group) for group in optimizer.param_groups] if checkpoint else []
        with plain(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        _apply_options(self.optimizer, self.lr_scheduler, fresh)
        path = Path(checkpoint) / SHARED_STATE
        with plain(checkpoint):
            state = load_state(path, self.args.device)
        self.load_shared_state(state)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with plain(checkpoint):
            super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        saved = checkpoints.read_manifest(Path(checkpoint))["run"]
        path = Path(checkpoint) / PROCESS_STATE.format(self.args.process_index)
        if not path.exists():
            logger.warning("%s has nothing of process %d", checkpoint, self.args.process_index)
            return
        with plain(checkpoint):
            state = load_state(path, self.args.device)
        loop = state["loop"]
        self._tr_loss += loop["loss"]
        self._globalstep_last_logged = loop["last_logged"]
        self.watch.skipped, self.watch.in_a_row = loop["skipped"], loop["in_a_row"]
        self.load_process_state(state["own"], saved["shape"] == self._about["shape"])


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _apply_options(optimizer: Any, scheduler: Any, fresh: list[dict[str, Any]]) -> None:
    """Use the options of this run where they are others than the checkpoint's."""
    for group, options in zip(optimizer.param_groups, fresh, strict=True):
        start, before = options.get("initial_lr"), group.get("initial_lr")
        rate = group["lr"]
        if start is not None and before and start != before:
            rate = rate * start / before
        group.update(options, lr=rate)
    if all("initial_lr" in group for group in fresh) and hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [options["initial_lr"] for options in fresh]
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
