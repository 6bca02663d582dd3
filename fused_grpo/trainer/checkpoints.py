"""Checkpoint folders that are whole or not there: manifests, publishing, finding the last good one.

Everything is written into `.saving/checkpoint-N`, made durable, described by a manifest of sizes
and checksums, and renamed to `checkpoint-N`. What a crash leaves behind is in `.saving` and nowhere
else. A link that leads out of a checkpoint, or in the place of one, is a fault of it: nothing is
read, written or deleted through one. Only the standard library is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fused_grpo.trainer.confined import check_inside, is_inside, links_out

MANIFEST = "manifest.json"  # the marker that a checkpoint is complete
SAVING = ".saving"  # what is being written, replaced or removed
FORMAT = 1
# what a manifest must say
CONTENT = {"sequence": int, "step": int, "resumable": bool, "files": dict}
_NAME = re.compile(r"checkpoint-(\d+)", re.ASCII)
# how the writers of torch, tokenizers and safetensors, which raise no OSError, put it
WRITE_ERRORS = (
    *("PytorchStreamWriter", "inline_container", "os error", "No space left", "too large"),
    *("SafetensorError", "I/O error"),
)


class BrokenCheckpointError(ValueError):
    """A checkpoint is incomplete, or not what its manifest says."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder and its manifest; which of two is later is said by `sequence`, not by any clock."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def sequence(self) -> int:
        return int(self.manifest["sequence"])

    @property
    def finite(self) -> bool:
        """Whether weights and optimizer state were, when it was saved."""
        return bool(self.manifest.get("finite", True))

    @property
    def resumable(self) -> bool:
        """Whether it holds more than the model."""
        return bool(self.manifest["resumable"])


# ---- writing ------------------------------------------------------------------------------------


def draft_root(run_dir: Path) -> Path:
    """An empty folder for what is being saved; the end of the last attempt is removed."""
    root = _saving(run_dir)
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    return root


def publish(draft: Path, run_dir: Path, about: dict[str, Any]) -> Path:
    """Make a finished draft the checkpoint of its name, in one rename.

    Args:
        draft: `.saving/checkpoint-N` with all its files.
        run_dir: where it goes.
        about: what the manifest says beside the files: at least "step" and "resumable".
    """
    final = run_dir / draft.name
    latest = max((c.sequence for c in complete(run_dir)), default=0)
    body = {"format": FORMAT, "sequence": latest + 1, **about, "files": _describe(draft)}
    write_json(draft / MANIFEST, {**body, "sha256": _digest_json(body)})
    _sync_tree(draft)
    if os.path.lexists(final):
        # the same step once more, after a resume: `recover` knows how to go on here
        os.rename(final, draft.parent / f"replaced-{final.name}")
    os.rename(draft, final)
    _sync(run_dir)
    shutil.rmtree(draft.parent, ignore_errors=True)
    return final


def recover(run_dir: Path) -> None:
    """Finish or clear away what a crash has interrupted. Call it while nothing else writes."""
    root = _saving(run_dir)
    if not root.exists():
        return
    for draft in root.iterdir():
        final = run_dir / draft.name
        if _NAME.fullmatch(draft.name) and not final.exists() and not problems_of(draft):
            os.rename(draft, final)  # only the rename was missing
            _sync(run_dir)
    shutil.rmtree(root, ignore_errors=True)


def rotate(run_dir: Path, limit: int | None, keep: Iterable[Path]) -> None:
    """Remove the oldest complete checkpoints beyond `limit`, never those of `keep`.

    Nor the last one with finite weights: those after it are nothing to go on from.
    """
    if not limit or limit <= 0:
        return
    kept = {path.resolve() for path in keep}
    whole = sorted(complete(run_dir), key=lambda c: c.sequence)
    kept |= {c.folder.resolve() for c in [c for c in whole if c.finite][-1:]}
    old = [c.folder for c in whole if c.folder.resolve() not in kept]
    for folder in old[: max(0, len(whole) - max(limit, len(kept)))]:
        aside = _saving(run_dir) / f"removed-{folder.name}"
        aside.parent.mkdir(exist_ok=True)
        os.rename(folder, aside)  # so that nobody meets it half removed
        shutil.rmtree(aside.parent, ignore_errors=True)


def is_write_error(error: Exception) -> bool:
    """Whether it says that something could not be written, whoever tried."""
    words = f"{type(error).__name__}: {error}"
    return isinstance(error, OSError) or any(part in words for part in WRITE_ERRORS)


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a crash leaves the old file or the new one."""
    draft = path.with_name(path.name + ".tmp")
    check_inside(draft)
    draft.write_text(json.dumps(value, indent=1) + "\n")
    _sync(draft)
    os.replace(draft, path)
    _sync(path.parent)


# ---- reading ------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. BrokenCheckpointError: it has none, or a damaged one."""
    path = folder / MANIFEST
    if not path.exists():
        raise BrokenCheckpointError(
            f"{folder} has no {MANIFEST}: it was not finished, or another trainer wrote it"
        )
    try:
        body = json.loads(path.read_text())
        digest = body.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise BrokenCheckpointError(f"{path} is damaged: {error}") from error
    if digest != _digest_json(body):
        raise BrokenCheckpointError(f"{path} is damaged: it is not what was written")
    if body.get("format") != FORMAT:
        raise BrokenCheckpointError(f"{path} has format {body.get('format')}, not {FORMAT}")
    for key, kind in CONTENT.items():
        if not isinstance(body.get(key), kind):
            raise BrokenCheckpointError(
                f"{path} is damaged: its {key!r} is {body.get(key)!r}, no {kind.__name__}"
            )
    for name, entry in body["files"].items():
        if not is_inside(name):
            raise BrokenCheckpointError(f"{path} names {name!r}, which is outside of its folder")
        if not isinstance(entry, dict) or entry.keys() != {"bytes", "sha256"}:
            raise BrokenCheckpointError(f"{path} is damaged: {name!r} is {entry!r}")
    return dict(body)


def problems_of(folder: Path, checksums: bool = True) -> list[str]:
    """What keeps a checkpoint from being used, in words; nothing if it is whole."""
    if folder.is_symlink():
        return [f"{folder} is a link to {os.readlink(folder)}: name the folder it leads to"]
    outside = links_out(folder)
    if outside:
        return [
            f"{path} is a link to {os.readlink(path)}, out of the checkpoint" for path in outside
        ]
    try:
        expected = read_manifest(folder)["files"]
    except BrokenCheckpointError as error:
        return [str(error)]
    problems = []
    for name, entry in expected.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif path.stat().st_size != entry["bytes"]:
            problems.append(f"{path} has {path.stat().st_size} bytes instead of {entry['bytes']}")
    if checksums and not problems:
        try:
            found = _digests(folder, expected)
        except OSError as error:  # a disk that fails: there may be an older one elsewhere on it
            return [f"{folder} cannot be read: {error}"]
        problems = [
            f"{folder / name} is damaged: its checksum is not that of what was written"
            for name, entry in expected.items()
            if found[name] != entry["sha256"]
        ]
    return problems


def complete(run_dir: Path) -> list[Checkpoint]:
    """The checkpoints of a folder that have a manifest and files of the right sizes."""
    return [
        Checkpoint(folder, read_manifest(folder))
        for folder in _folders(run_dir)
        if not problems_of(folder, checksums=False)
    ]


def latest(run_dir: Path) -> Path | None:
    """The checkpoint written last that is complete, as far as sizes tell."""
    found = max(complete(run_dir), key=lambda c: c.sequence, default=None)
    return found.folder if found else None


def last_good(run_dir: Path) -> tuple[Path | None, list[str]]:
    """(the latest checkpoint to resume from, or None; what is wrong with those passed over)."""
    problems = [
        problem
        for folder in _folders(run_dir)
        for problem in problems_of(folder, checksums=False)[:1]
    ]
    for checkpoint in sorted(complete(run_dir), key=lambda c: -c.sequence):
        if not checkpoint.resumable:
            problems.append(f"{checkpoint.folder} holds the model only (save_only_model)")
            continue
        if not checkpoint.finite:
            problems.append(f"{checkpoint.folder} holds weights or moments that are not finite")
            continue
        found = problems_of(checkpoint.folder)
        if not found:
            return checkpoint.folder, problems
        problems += found[:1]
    return None, problems


def is_name(name: str) -> bool:
    """Whether a checkpoint may be called so."""
    return _NAME.fullmatch(name) is not None


def _folders(run_dir: Path) -> list[Path]:
    if not run_dir.is_dir():
        return []
    named = [(_NAME.fullmatch(path.name), path) for path in run_dir.iterdir() if path.is_dir()]
    return [path for _, path in sorted((int(m[1]), path) for m, path in named if m)]


def _saving(run_dir: Path) -> Path:
    """The folder of drafts. A link in its place is removed: what it leads to is not the run's."""
    root = run_dir / SAVING
    if root.is_symlink():
        root.unlink()
    return root


# ---- bytes --------------------------------------------------------------------------------------


def _describe(folder: Path) -> dict[str, dict[str, Any]]:
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    sizes = {name: path.stat().st_size for name, path in sorted(files.items()) if path.is_file()}
    digests = _digests(folder, sizes)
    return {name: {"bytes": size, "sha256": digests[name]} for name, size in sizes.items()}


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    names = list(names)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
        return dict(zip(names, pool.map(lambda n: _digest_file(folder / n), names), strict=True))


def _digest_file(path: Path) -> str:
    digest, buffer = hashlib.sha256(), bytearray(1 << 20)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def _digest_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    if os.name == "nt":  # which opens no folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            _sync(Path(root) / name)
        _sync(Path(root))
