"""What the documentation names exists."""

import importlib
import re

import pytest


def rows(root):
    """(function, test) of each row of the table of docs/paper-to-code.md."""
    cells = re.compile(r"^\|[^|]+\| `([\w.]+)` \| `(tests/[\w/]+\.py)::(\w+)` \|$", re.M)
    return cells.findall((root / "docs" / "paper-to-code.md").read_text())


def test_every_row_of_paper_to_code_is_well_formed(root):
    lines = [line for line in (root / "docs" / "paper-to-code.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows(root)) == sum(not line.startswith("| Equation") for line in lines) > 0


def test_every_function_of_paper_to_code_exists(root):
    def exists(dotted):
        parts = dotted.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:cut]))
            except ModuleNotFoundError:
                continue
            for name in parts[cut:]:
                found = getattr(found, name, None)
            return found is not None
        return False

    assert [function for function, _, _ in rows(root) if not exists(function)] == []


def test_every_test_of_paper_to_code_exists(root):
    def exists(file, name):
        path = root / file
        return path.is_file() and re.search(rf"^def {name}\(", path.read_text(), re.M)

    assert [f"{file}::{name}" for _, file, name in rows(root) if not exists(file, name)] == []


@pytest.mark.parametrize("page", ["README.md", "docs/paper-to-code.md"])
def test_links_between_pages_lead_somewhere(root, page):
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", (root / page).read_text())
    assert [target for target in targets if not ((root / page).parent / target).exists()] == []
