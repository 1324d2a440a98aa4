"""The example of docs/objective.md runs and prints what the page says."""

import contextlib
import io
import re


def test_the_example_prints_what_the_page_says(root):
    page = (root / "docs" / "objective.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)
    said = re.search(r"```text\n(.*?)```", page, re.DOTALL).group(1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/objective.md", "exec"), {})
    assert printed.getvalue() == said
