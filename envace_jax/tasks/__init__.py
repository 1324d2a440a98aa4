"""Tasks: what an episode starts from and what it is judged by."""

from envace_jax.tasks.files import read_records, read_tasks
from envace_jax.tasks.records import ChecklistItem, Task, TaskError, parse_task

__all__ = ["ChecklistItem", "Task", "TaskError", "parse_task", "read_records", "read_tasks"]
