"""What the verbs of the command line share."""


def example(command: str, *more: str) -> str:
    """The last lines of a verb's help."""
    lines = "\n\n".join(f"    {line}" for line in (command, *more))
    return f"Example:\n\n{lines}"
