"""The policy that ships, on real prompts: bfloat16 arithmetic stays close to float32."""

import jax
import jax.numpy as jnp

from envace_jax.chat import ChatTokenizer
from envace_jax.tasks.mini import mini_tasks
from models.qwen3 import load_hf


def test_bfloat16_arithmetic_stays_close_to_float32(root):
    directory = root / "models" / "qwen3_mini"
    chat = ChatTokenizer.from_pretrained(directory)
    exact, rounded = load_hf(directory, dtype=jnp.float32), load_hf(directory, dtype=jnp.bfloat16)
    divergence, agree = [], []
    for task in mini_tasks("test", 6):
        ids = jnp.asarray(chat.render(list(task.messages), list(task.tools), False, False)[None])
        p, q = (jax.nn.log_softmax(model.logits(model(ids)[0])[0]) for model in (exact, rounded))
        divergence.append(jnp.sum(jnp.exp(p) * (p - q), axis=-1))
        agree.append(p.argmax(-1) == q.argmax(-1))
    assert float(jnp.concatenate(divergence).mean()) < 1e-3
    assert float(jnp.concatenate(agree).mean()) >= 0.98
