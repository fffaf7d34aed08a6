"""Open and walk folders of a disk; links below the first folder are never followed.

Each folder is opened from the open one above it: one that is replaced by a link meanwhile leads
nowhere either.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rayapp.storage.base import HIDDEN

FOLDER = os.O_RDONLY | os.O_DIRECTORY


@contextmanager
def opened(top: str, prefix: str = "", refuse: bool = False) -> Iterator[int | None]:
    """Open a folder; None if it is absent, or if a link below `top` is on the way to it.

    With `refuse`, such a link is an OSError.
    """
    with ExitStack() as stack:
        folder: int | None = None
        try:
            for part in (top, *filter(None, prefix.split("/"))):
                below_top = refuse and folder is not None
                if below_top and stat.S_ISLNK(os.lstat(part, dir_fd=folder).st_mode):
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                flags = FOLDER if folder is None else FOLDER | os.O_NOFOLLOW
                folder = os.open(part, flags, dir_fd=folder)
                stack.callback(os.close, folder)
        except (FileNotFoundError, NotADirectoryError):  # the second also of a link
            folder = None
        yield folder


def below(folder: int | None) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (name, lstat) of all below an open folder but folders and the storage's own files."""
    if folder is None:
        return
    for path, folders, files, inner in os.fwalk(".", dir_fd=folder, onerror=_unless_gone):
        folders[:] = [name for name in folders if not name.startswith(HIDDEN)]
        for name in (*files, *folders):
            try:
                info = os.lstat(name, dir_fd=inner)
            except FileNotFoundError:  # deleted since the folder was read
                continue
            if not name.startswith(HIDDEN) and not stat.S_ISDIR(info.st_mode):
                yield f"{path}/{name}"[2:], info


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
