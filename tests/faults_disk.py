"""Faults of disks, files and directories, and of two runs in one of them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fault_arena import GOES_ON, LEFT_OUT, SAVED, SET_ASIDE, STEPS, STOPS, Arena, Fault
from run_holder import holder
from trainer_runs import letters
from transformers import modeling_utils

from fused_grpo.trainer import GRPOTrainer, checkpoints, state

Inject = Callable[[Arena], None]

# ---- every operation on a file -------------------------------------------------------------------

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "sync", "write")
_listener: Callable[[str, str], None] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _listener is None or event not in EVENTS or not isinstance(arguments[0], (str, Path)):
        return
    if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    if event == "os.mkdir" and os.path.exists(arguments[0]):  # which is meant to be there
        return
    _listener(event.removeprefix("os."), str(arguments[0]))


sys.addaudithook(_hook)  # it stays, and does nothing while nobody listens


@contextmanager
def listening(folder: Path, patch: Any, listener: Callable[[str], None]) -> Iterator[None]:
    """Tells `listener` of each operation that writes below `folder`, before it is done."""
    global _listener

    def tell(event: str, path: str) -> None:
        if path.startswith(str(folder)):
            # the files of a checkpoint are synced in whatever order the disk has them
            alike = event == "sync" and path.endswith(
                (".json", ".jsonl", ".pt", "ors", ".bin", "pth")
            )
            listener(f"{event} {'a file' if alike else Path(path).name}")

    def before(module: Any, name: str, event: str, place: int) -> None:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            sys.audit(event, str(args[place]))
            return original(*args, **kwargs)

        patch.setattr(module, name, call)

    # writers that Python knows nothing of
    before(checkpoints, "_sync", "sync", 0)
    before(state, "save_file", "write", 1)
    before(torch, "save", "write", 1)
    before(modeling_utils, "safe_save_file", "write", 1)
    _listener = tell
    try:
        yield
    finally:
        _listener = None


# those of saving the third of three steps, in order
FILES_OF_ONE = 14
SAVING = (
    *("mkdir .saving", "mkdir checkpoint-3", "open config.json", "open generation_config.json"),
    *("write model.safetensors", "open tokenizer_config.json", "write training_args.bin"),
    *("write optimizer.pt", "write scheduler.pt", "write rng_state.pth"),
    *("open trainer_state.json", "write process_state_0.safetensors", "open trainer_state.json"),
    *("write run_state.safetensors", "open metrics.jsonl", "open manifest.json.tmp"),
    *("sync manifest.json.tmp", "rename manifest.json.tmp", "sync checkpoint-3"),
    *(*["sync a file"] * FILES_OF_ONE, "sync checkpoint-3", "rename checkpoint-3", "sync run"),
    "rmdir .saving",
)
THERE = len(SAVING) - 2  # from here on the checkpoint has its name


def _disk_full_at(number: int) -> Inject:
    """The disk is full at one operation of saving step `STEPS`."""

    def inject(arena: Arena) -> None:
        def prepare(run: GRPOTrainer) -> None:
            save, count = run._save_checkpoint, -1

            def full(what: str) -> None:
                nonlocal count
                count += 1
                if count == number:
                    assert what == SAVING[number]
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), what)

            def saving(*args: Any) -> None:
                with listening(arena.folder, arena.patch, full):
                    save(*args)

            run._save_checkpoint = saving  # type: ignore[method-assign]

        arena.prepare.append(prepare)

    return inject


# ---- damage --------------------------------------------------------------------------------------

FILES = (
    *("config.json", "generation_config.json", "metrics.jsonl", "model.safetensors"),
    *("optimizer.pt", "process_state_0.safetensors", "rng_state.pth", "run_state.safetensors"),
    *("scheduler.pt", "tokenizer.json", "tokenizer_config.json", "trainer_state.json"),
    *("training_args.bin", "manifest.json"),
)


def _halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut": _halve,
    "empty": lambda path: os.truncate(path, 0),
    "a bit": _flip,
    "gone": lambda path: path.unlink(),
}


def _damage(harm: Callable[[Path], None], name: str) -> Inject:
    return lambda arena: harm(arena.saved / name)


def _damaged_and_asked_for(arena: Arena) -> None:
    _flip(arena.saved / "model.safetensors")
    arena.resume = str(arena.saved)


def _cannot_be_read(arena: Arena) -> None:
    original = checkpoints._digest_file

    def digest(path: Path) -> str:
        if path.parent == arena.saved:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return original(path)

    arena.patch.setattr(checkpoints, "_digest_file", digest)


def _manifest_is_a_folder(arena: Arena) -> None:
    (arena.saved / "manifest.json").unlink()
    (arena.saved / "manifest.json").mkdir()


def _another_model(arena: Arena) -> None:
    import trainer_runs

    def other(dtype: Any) -> Any:
        model, tokenizer = tiny(dtype)
        model.config.intermediate_size += 8
        return type(model)(model.config), tokenizer

    tiny = trainer_runs.tiny
    arena.patch.setattr(trainer_runs, "tiny", other)


def _leftovers(arena: Arena) -> None:
    """Of a run that was killed while it saved, and of hands."""
    draft = arena.folder / ".saving" / "checkpoint-3"
    draft.mkdir(parents=True)
    (draft / "model.safetensors").write_bytes(b"half")
    (arena.folder / "checkpoint-4").mkdir()
    (arena.folder / "checkpoint-3").write_text("a file")


# ---- directories, logs and locks -----------------------------------------------------------------


def _output_dir(path: str) -> Inject:
    def inject(arena: Arena) -> None:
        arena.options["output_dir"] = path.format(file=arena.saved / "config.json")
        arena.resume = None

    return inject


def _at_the_reward(change: Callable[[Arena], None], **options: Any) -> Inject:
    """Does something to the directory in the middle of the run."""

    def inject(arena: Arena) -> None:
        def reward(completions: list[str], **_: Any) -> list[float]:
            change(arena)
            return letters(completions)

        reward.__name__ = "letters"
        arena.reward = reward
        arena.options |= options

    return inject


def _vanishes(arena: Arena) -> None:
    shutil.rmtree(arena.folder)


def _becomes_a_file(arena: Arena) -> None:
    aside = arena.folder.with_name("aside")
    arena.folder.rename(aside)
    arena.folder.write_text("")

    def back() -> None:
        if aside.exists():
            arena.folder.unlink()
            aside.rename(arena.folder)

    arena.cleanup.append(back)


def _read_only(arena: Arena) -> None:
    """As root, who may write everywhere, would not see by a mode."""
    original = Path.open

    def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if arena.folder in path.parents and mode[0] != "r":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return original(path, mode, *args, **kwargs)

    arena.patch.setattr(Path, "open", opened)


def _log_is_a_folder(arena: Arena) -> None:
    (arena.folder / "metrics.jsonl").unlink()
    (arena.folder / "metrics.jsonl").mkdir()


def _log_cannot_be_written(arena: Arena) -> None:
    original = Path.open

    def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if path == arena.folder / "metrics.jsonl" and mode == "a":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return original(path, mode, *args, **kwargs)

    arena.patch.setattr(Path, "open", opened)


def _text_in(name: str, text: str) -> Inject:
    return lambda arena: (arena.folder / name).write_text(text) and None


def _lock_is_a_folder(arena: Arena) -> None:
    lock = arena.folder / "run.lock"
    lock.unlink()
    lock.mkdir()
    arena.cleanup.append(lambda: lock.rmdir() if lock.is_dir() else None)


def _second_run(resume: Any) -> Inject:
    def inject(arena: Arena) -> None:
        other = holder(arena.folder)

        def end() -> None:
            other.kill()
            other.communicate()

        arena.resume = resume
        arena.cleanup.append(end)

    return inject


def _killed_holder(arena: Arena) -> None:
    other = holder(arena.folder)
    other.kill()
    other.communicate()


STALE = json.dumps({"pid": 2**22, "host": "elsewhere"})
GOING = "belongs to a run that is still going, process "
FULL = "checkpoint-3 could not be saved (OSError: [Errno 28] No space left on device"
NOT_WRITTEN = "cannot be written to"
DISK_FAULTS = [
    Fault(
        "A full disk",
        f"at `{what}` (operation {i})",
        _disk_full_at(i),
        "" if what.startswith("rmdir") else FULL,
        SET_ASIDE,
        left=STEPS if i >= THERE else SAVED,
    )
    for i, what in enumerate(SAVING)
    if what != "sync a file" or SAVING[i - 1] != what or SAVING[i + 1] != what  # the ends of many
]
DISK_FAULTS += [
    Fault(
        "Damaged checkpoints", f"`{name}` is cut", _damage(_halve, name), "passed over: ", GOES_ON
    )
    for name in FILES
]
DISK_FAULTS += [
    Fault("Damaged checkpoints", *row)
    for row in (
        (
            "one that is asked for by name",
            _damaged_and_asked_for,
            "is damaged: its checksum is not that of what was written. The last good checkpoint",
            STOPS,
            2,
            SAVED - 1,
        ),
        ("the disk fails to read it", _cannot_be_read, "cannot be read: [Errno 5]", GOES_ON),
        ("its manifest is a folder", _manifest_is_a_folder, "manifest.json is damaged", GOES_ON),
        ("it is another model's", _another_model, "belongs to another run: model: ", STOPS),
        ("leftovers of kills and hands", _leftovers, "it was not finished, or another", GOES_ON),
    )
]
DISK_FAULTS += [
    Fault("Directories and logs", *row)
    for row in (
        ("output_dir cannot be made", _output_dir("/proc/no/run"), NOT_WRITTEN, STOPS),
        ("output_dir is a file", _output_dir("{file}"), NOT_WRITTEN, STOPS),
        ("output_dir is below a file", _output_dir("{file}/run"), NOT_WRITTEN, STOPS),
        ("output_dir is read-only", _read_only, NOT_WRITTEN, STOPS),
        ("output_dir vanishes", _at_the_reward(_vanishes), "", LEFT_OUT),
        (
            "output_dir becomes a file",
            _at_the_reward(_becomes_a_file, max_failed_saves=1),
            "checkpoint-3 could not be saved",
            STOPS,
        ),
        ("metrics.jsonl is a folder", _log_is_a_folder, "is not written for now", LEFT_OUT),
        ("metrics.jsonl: no room", _log_cannot_be_written, "is not written for now", LEFT_OUT),
        ("metrics.jsonl is damaged", _text_in("metrics.jsonl", "{\n[1]\nx"), "", GOES_ON),
        ("run.json is damaged", _text_in("run.json", "{"), "", GOES_ON),
    )
]
DISK_FAULTS += [
    Fault("Two runs in one directory", *row)
    for row in (
        ("the second resumes", _second_run(True), GOING, STOPS),
        ("the second begins", _second_run(None), GOING, STOPS),
        ("the first was killed", _killed_holder, "", GOES_ON),
        ("a lock of a process that is gone", _text_in("run.lock", STALE), "", GOES_ON),
        ("a lock of nobody", _text_in("run.lock", "\0\0garbage"), "", GOES_ON),
        ("the lock is a folder", _lock_is_a_folder, NOT_WRITTEN, STOPS),
    )
]
