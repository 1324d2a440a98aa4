"""The embedded world: an executable shop, its tasks, its scripted actors, and what counts as success there."""

from envace_jax.tasks.mini.generate import mini_tasks
from envace_jax.tasks.mini.shop import RESULT_SCHEMAS, TOOLS, WRITES, Shop

__all__ = ["RESULT_SCHEMAS", "TOOLS", "WRITES", "Shop", "mini_tasks"]
