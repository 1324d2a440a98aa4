"""EnvACE-JAX: one policy that acts and rehearses its world, trained by role-wise GRPO (arXiv 2608.06197).

The packages read from left to right, and nothing imports anything to its right:
chat, tasks, rewards, grpo, sampling → rollout → train, rehearse → evaluate, serve; report reads run directories only.
The model itself is the top-level package `models`, which knows nothing of this one.
"""

__version__ = "0.1.0"
