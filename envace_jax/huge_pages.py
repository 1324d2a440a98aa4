"""Huge pages for what this process allocates.

A step takes and returns gigabytes of temporaries, and Linux hands memory out in pages of 4 kB that are cleared one by
one; in pages of 2 MB a training step on a CPU takes 7 % less time (measured; see docs/models.md). glibc asks for them
only where a variable says so as the process starts, so the process is started once more with that variable.
"""

import os
import sys
from pathlib import Path

VARIABLE, VALUE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def use() -> None:
    """Start this program again with huge pages, under the same process id, where Linux leaves them to the program.

    Nothing happens where the variable is set already, to whatever value, or huge pages are always or never given.
    """
    try:
        asked_for = "[madvise]" in SETTING.read_text()
    except OSError:  # not Linux, or a kernel without huge pages
        return
    if asked_for and VARIABLE not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, VARIABLE: VALUE})


def environment_without() -> dict[str, str]:
    """The environment of this process as it was before `use`, for a program that is to run as it would by itself."""
    return {name: value for name, value in os.environ.items() if (name, value) != (VARIABLE, VALUE)}
