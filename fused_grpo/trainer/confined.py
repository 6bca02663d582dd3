"""A run writes and deletes below its output directory only, whatever links somebody put there.

The output directory may itself be a link, and a folder that was named may: they are what was asked
for. Only the standard library is needed.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath, PureWindowsPath


class OutsideError(OSError):
    """A file of a run is a link that leads out of its folder."""


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a path is a link to something outside of `folder`."""
    return path.is_symlink() and not path.resolve().is_relative_to(folder.resolve())


def check_inside(path: Path) -> None:
    """OutsideError where a file of a run is a link that leads out of its folder."""
    if leads_out(path, path.parent):
        raise OutsideError(
            f"{path} is a link to {os.readlink(path)}, outside of its folder: remove the link"
        )


def links_out(folder: Path) -> list[Path]:
    """The links anywhere below a folder that lead out of it."""
    return [
        Path(root) / name
        for root, folders, files in os.walk(folder)
        for name in sorted([*folders, *files])
        if leads_out(Path(root) / name, folder)
    ]


def is_inside(name: str) -> bool:
    """Whether a name, on any system, can only mean something below the folder it is read in."""
    windows = PureWindowsPath(name)
    parts = {*PurePosixPath(name).parts, *windows.parts}
    return bool(parts) and ".." not in parts and not name.startswith("/") and not windows.anchor
