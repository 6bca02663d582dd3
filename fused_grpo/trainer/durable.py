"""`DurableTrainer`: runs that can be killed, continued and believed.

A resumed run continues as if it had never stopped, steps that are not finite are left out, and
signals end a run with a checkpoint. How that is written is in saving.py.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from fused_grpo.trainer import checkpoints, identity
from fused_grpo.trainer.confined import check_inside
from fused_grpo.trainer.guards import Interrupted, RunLock, RunLockedError, StopSignals
from fused_grpo.trainer.metrics import METRICS_FILE
from fused_grpo.trainer.nonfinite import ADVICE, NonFiniteError, StepWatch, weights_in_words
from fused_grpo.trainer.saving import SavingTrainer

logger = logging.getLogger(__name__)


@contextmanager
def writing_to(output_dir: str) -> Iterator[None]:
    """Says of an OSError which option it is about."""
    try:
        yield
    except RunLockedError:
        raise
    except OSError as error:
        raise OSError(
            f"output_dir={output_dir} cannot be written to ({error}): make it writable, make room, "
            "or choose another output_dir"
        ) from error


class DurableTrainer(SavingTrainer):
    """See the module, and `SavingTrainer` for what subclasses provide."""

    policy: Any
    processing_class: Any

    def __init__(self, **kwargs: Any) -> None:
        if kwargs["args"].should_save:  # the Trainer makes it as well, and says less
            with writing_to(kwargs["args"].output_dir):
                os.makedirs(kwargs["args"].output_dir, exist_ok=True)
        super().__init__(**kwargs)
        self.lock = RunLock(Path(self.args.output_dir))
        self._signals = StopSignals()
        self._forget()

    def _forget(self) -> None:
        self.watch = StepWatch()
        self._stop_signal, self._explanation, self._stopping = 0, "", False
        self._failed_saves = 0

    # ---- a run ----------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """See `transformers.Trainer.train`, and for what differs docs/trainer-checkpoints.md.

        Args:
            resume_from_checkpoint: True for the last good checkpoint of `output_dir`, or to begin
                where there is none; or a folder.

        Raises:
            BrokenCheckpointError, ValueError: a checkpoint that is damaged, or of another run.
            RunLockedError: another process trains in the same `output_dir`.
            NonFiniteError: after `max_nonfinite_steps` in a row.
            SaveError: after `max_failed_saves` in a row.
            Interrupted: after SIGTERM or SIGINT, once a checkpoint is saved.
        """
        self._forget()
        self._about = self.run_about()
        with self.owned():
            with self._signals:
                checkpoint = self._on_main(lambda: self._begin(resume_from_checkpoint))
                self._resumed_from = {Path(checkpoint).resolve().parent} if checkpoint else set()
                result = super().train(checkpoint, *args, **kwargs)
            self._raise_if_stopped()
        return result

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Keeps other runs out of the output directory. RunLockedError: one is in there."""
        self._on_main(self._lock_up)
        try:
            yield
        finally:
            if self.is_world_process_zero():
                self.lock.release()

    def _lock_up(self) -> None:
        with writing_to(self.args.output_dir):
            self.lock.acquire()

    def _begin(self, asked: Any) -> str | None:
        """The checkpoint to resume from; leaves the directory as that checkpoint knows it."""
        run_dir = Path(self.args.output_dir)
        with writing_to(str(run_dir)):
            checkpoints.recover(run_dir)
        found = identity.find(run_dir, asked, self._about)
        with writing_to(str(run_dir)):
            checkpoints.write_json(run_dir / identity.RUN_FILE, identity.run_record(self._about))
        if found is None:
            return None
        logger.warning("resuming from %s", found)
        check_inside(run_dir / METRICS_FILE)
        try:
            if (found / METRICS_FILE).exists():
                shutil.copy(found / METRICS_FILE, run_dir / METRICS_FILE)
        except OSError as error:  # a log is no reason not to train
            logger.warning("%s keeps what it has: %s", run_dir / METRICS_FILE, error)
        return str(found)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:  # resumed where all is done
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    # ---- steps that are not finite, and signals -------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.watch.add_loss(loss)
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Called once a step, when its gradient is complete: all processes agree on what it is."""
        norm = super()._get_grad_norm(model, grad_norm)
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        # fp16's scaler leaves out overflows, which are normal
        scaled = getattr(self.accelerator, "scaler", None) is not None
        good = self.watch.is_finite(float(whole), ignore_gradient=scaled)
        flags = torch.tensor([float(not good), float(self._signals.received)])
        if self.args.world_size > 1:
            gathered = self.accelerator.gather(flags[None].to(self.args.device))
            flags = gathered.max(0).values.cpu()
        good, self._stop_signal = not flags[0], int(flags[1])
        if not good:
            self._skip(model, whole)
        if not scaled:
            # the Trainer reads this from accelerate and leaves the scheduler where it is
            optimizer: Any = self.optimizer
            optimizer._is_overflow = not good
        self.watch.count(good)
        return norm

    def _skip(self, model: nn.Module, norm: Any) -> None:
        """Without gradients the optimizer leaves weights and its own state as they are."""
        last = self.watch.in_a_row + 1 >= self.args.max_nonfinite_steps
        lines = self.watch.explain(self.processing_class, self.policy if last else None)
        if self.args.world_size > 1:
            lines = gather_object([f"process {self.args.process_index}, {x}" for x in lines])
        model.zero_grad()
        facts = "\n  ".join(lines)
        words = (
            f"step {self.state.global_step + 1} is skipped, {self.watch.in_a_row + 1} in a row: "
            f"its loss or its gradient (norm {float(norm):.4g}) is not finite\n  {facts}"
        )
        if last:
            words += f"\n{weights_in_words(model)}"
            self._explanation = words
        if self.is_world_process_zero():
            logger.warning(words)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.args.world_size == 1:  # it may have come during the step
            self._stop_signal = self._signals.received
        if (self._stop_signal or self._explanation) and not self._stopping:
            self._stopping = True  # not once more at the end of the epoch
            self.control.should_training_stop = self.control.should_save = True
            if self._stop_signal:
                self.control.should_evaluate = False  # whoever sent it may not wait for that
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _raise_if_stopped(self) -> None:
        saved = checkpoints.latest(Path(self.args.output_dir))
        state = f"The state is in {saved}" if saved else "No checkpoint could be saved"
        if self._explanation:
            raise NonFiniteError(f"{self._explanation}\n{state}. {ADVICE}")
        if self._stop_signal:
            raise Interrupted(
                self._stop_signal,
                f"stopped by a signal after step {self.state.global_step}. {state}; "
                "train(resume_from_checkpoint=True) goes on from there",
            )
        if self._signals.received:  # during the last step: the run is over, the program is not
            os.kill(os.getpid(), self._signals.received)
