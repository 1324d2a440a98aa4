"""Starting again with huge pages."""

import json
import os
import subprocess
import sys

import pytest

from envace_jax import huge_pages

REPORT = """
import json, os, sys
from envace_jax import huge_pages

print(os.getpid(), flush=True)
huge_pages.use()
block = bytearray(64 * 2**20)
smaps = open("/proc/self/smaps_rollup").read() if os.path.exists("/proc/self/smaps_rollup") else ""
huge = sum(int(line.split()[1]) for line in smaps.splitlines() if line.startswith("AnonHugePages"))
print(json.dumps([os.getpid(), sys.argv[1:], os.environ.get(huge_pages.VARIABLE), huge]))
"""


def report(**environment: str) -> tuple[list[int], list[str], str | None, int]:
    """A program that uses huge pages: process ids at each start, arguments, the variable, kB in such pages."""
    base = huge_pages.environment_without()
    base.pop(huge_pages.VARIABLE, None)
    command = [sys.executable, "-c", REPORT, "one", "two words"]
    *starts, last = subprocess.run(
        command, capture_output=True, text=True, check=True, env=base | environment
    ).stdout.splitlines()
    pid, arguments, variable, huge = json.loads(last)
    return [*map(int, starts), pid], arguments, variable, huge


def asked_for() -> bool:
    return huge_pages.SETTING.exists() and "[madvise]" in huge_pages.SETTING.read_text()


@pytest.mark.skipif(not asked_for(), reason="this system gives huge pages to all programs or to none")
def test_starts_again_once_as_the_same_process_with_the_same_arguments():
    pids, arguments, variable, huge = report()
    assert len(pids) == 3 and len(set(pids)) == 1
    assert arguments == ["one", "two words"]
    assert variable == huge_pages.VALUE
    assert huge > 32 * 2**10


def test_a_variable_that_is_set_stays():
    pids, arguments, variable, _ = report(**{huge_pages.VARIABLE: "glibc.malloc.hugetlb=0"})
    assert len(pids) == 2
    assert variable == "glibc.malloc.hugetlb=0"


def test_environment_without_takes_its_own_value_alone_away(monkeypatch):
    monkeypatch.setenv(huge_pages.VARIABLE, huge_pages.VALUE)
    assert huge_pages.VARIABLE not in huge_pages.environment_without()
    monkeypatch.setenv(huge_pages.VARIABLE, "other")
    assert huge_pages.environment_without() == dict(os.environ)
