"""Tasks: what an episode starts from and what it is judged by."""

from envace_jax.tasks.records import ChecklistItem, Task, TaskError, parse_task, read_tasks

__all__ = ["ChecklistItem", "Task", "TaskError", "parse_task", "read_tasks"]
