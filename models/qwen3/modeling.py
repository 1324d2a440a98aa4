"""The Qwen3 forward pass in Flax NNX.

Tokens are embedded, run through L identical layers, and normalised:

    x = x + o_proj(attention(rope(q_norm(q_proj(norm(x)))), rope(k_norm(k_proj(norm(x)))), v_proj(norm(x))))
    x = x + down_proj(silu(gate_proj(norm(x))) * up_proj(norm(x)))

The parameters of all layers are stacked [L, ...] and the layers are one `jax.lax.scan`, so compile time does not grow
with depth; a KV cache is carried through that scan. Matrices are stored [out, in] as Hugging Face stores them.
Parameters have `param_dtype`, arithmetic is in `dtype`; norms, softmax and logits are float32.
Reference: Qwen3 technical report, arXiv 2505.09388; transformers `modeling_qwen3.py` for the details.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.qwen3.attention import ATTENDED, IMPLEMENTATIONS, LANES, SPLASH_BLOCK, cached_attention, self_attention
from models.qwen3.cache import CacheRows, KVCache
from models.qwen3.config import Qwen3Config
from models.qwen3.sharding import batch_axes, check_divisible, constrain

REMAT = ("none", "layer", "dots", "offload")
_LAYER_INPUT = "layer_input"
_FEW_ROWS = 128
_LARGE = 2**17  # elements of a matrix; smaller ones keep the rounding, to the bit, of runs that were published


def default_dtype() -> jnp.dtype:
    """Compute type of this process's platform: bfloat16 on TPU and GPU, float32 on CPU."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def linear(x: jax.Array, w: jax.Array, preferred_element_type=None, mesh: Mesh | None = None) -> jax.Array:
    """x [..., in] times w [out, in] -> [..., out], in x's type; `mesh` is where they lie, where they are sharded."""
    w = w.astype(x.dtype)
    contract = functools.partial(jax.lax.dot_general, preferred_element_type=preferred_element_type)
    if jax.default_backend() != "cpu":
        return contract(x, w, (((x.ndim - 1,), (1,)), ((), ())))
    # Rows are flattened: the weight's gradient, contracting two axes at once, would take twice as long.
    flat = x.reshape(-1, x.shape[-1])
    if 1 < len(flat) <= _FEW_ROWS:
        product = _few_rows_product(flat, w, preferred_element_type)
    elif mesh is None and len(flat) > _FEW_ROWS and w.size >= _LARGE and x.dtype == jnp.float32:
        product = _many_rows_product(flat, w)
    else:
        product = contract(flat, w, (((1,), (1,)), ((), ())))
    return product.reshape(*x.shape[:-1], w.shape[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _few_rows_product(x: jax.Array, w: jax.Array, preferred_element_type) -> jax.Array:
    """x [rows, in] times w [out, in] -> [rows, out] on a CPU, for few rows.

    The weight becomes the left operand: XLA's CPU matmul then runs along the stored rows of the weight, 1.2 (64 rows)
    to 1.6 times (16) as fast as the other way round. Without a barrier XLA would fold the transposition into the
    product and turn it round again. Gradients are those of the product as it is written: of this one, XLA would sum
    over the outputs in as many parts as there are threads, and a gradient would depend on the machine.
    """
    columns = jax.lax.dot_general(w, x, (((1,), (1,)), ((), ())), preferred_element_type=preferred_element_type)
    return jax.lax.optimization_barrier(columns).T


def _few_rows_backward(_, operands: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = operands
    return (gradient @ w).astype(x.dtype), (gradient.T @ x).astype(w.dtype)


_few_rows_product.defvjp(
    lambda x, w, preferred: (_few_rows_product(x, w, preferred), (x, w)),
    _few_rows_backward,
)


@jax.custom_vjp
def _many_rows_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [rows, in] times w [out, in] -> [rows, out] on a CPU, for many rows.

    The gradient of w is a sum over rows. XLA is faster, 1.1 to 1.25 times on two cores, where these lie along the rows
    of the left operand: x is transposed for it where out > in, and the result back, and the gradient elsewhere.
    """
    return x @ w.T


def _many_rows_backward(operands: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = operands
    if len(w) > w.shape[1]:
        return gradient @ w, _transposed(_transposed(x) @ gradient)
    return gradient @ w, _transposed(gradient) @ x


_many_rows_product.defvjp(lambda x, w: (x @ w.T, (x, w)), _many_rows_backward)


def _transposed(x: jax.Array) -> jax.Array:
    """x.T, in memory, as a pass of its own.

    XLA would fold it into a product or into its elementwise neighbours, which then take six to eight times as long on a
    CPU as both passes do. A function that may not be inlined, with the layout of its result fixed, prevents that. Over
    a mesh every device would run it on the whole of x.
    """
    with set_xla_metadata(inlineable="false"):
        return jax.jit(lambda x: with_layout_constraint(x.T, Layout((0, 1))))(x)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., D] scaled to unit mean square, times weight [D]; computed in float32, returned in x's type."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * weight.astype(jnp.float32)).astype(x.dtype)


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [B, T, H, Dh] by cos, sin float32[B, T, Dh / 2]; halves of the head dimension form the pairs."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


class Layers(nnx.Module):
    """The parameters of all layers, each stacked [L, ...]; matrices are [L, out, in]."""

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs, param_dtype):
        c, n = config, config.num_hidden_layers
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim

        def matrix(rows: int, columns: int) -> nnx.Param:
            init = jax.random.normal(rngs.params(), (n, rows, columns), param_dtype)
            return nnx.Param(init * jnp.asarray(c.initializer_range, param_dtype))

        def ones(size: int) -> nnx.Param:
            return nnx.Param(jnp.ones((n, size), param_dtype))

        self.input_layernorm = ones(c.hidden_size)
        self.q_proj, self.k_proj, self.v_proj = (matrix(size, c.hidden_size) for size in (q, kv, kv))
        self.o_proj = matrix(c.hidden_size, q)
        self.q_norm, self.k_norm = ones(c.head_dim), ones(c.head_dim)
        self.post_attention_layernorm = ones(c.hidden_size)
        self.gate_proj, self.up_proj = (matrix(c.intermediate_size, c.hidden_size) for _ in range(2))
        self.down_proj = matrix(c.hidden_size, c.intermediate_size)

    def arrays(self) -> dict[str, jax.Array]:
        """The stacked arrays by name."""
        return {name: value[...] for name, value in vars(self).items() if isinstance(value, nnx.Param)}


class Qwen3(nnx.Module):
    """A dense Qwen3 language model.

    Args:
        config: the architecture.
        rngs: source of the initial parameters.
        param_dtype: type of the parameters.
        dtype: type of the arithmetic; None is bfloat16 on TPU and GPU, float32 on CPU.
        remat: what the backward pass recomputes: "none", "layer" (everything inside a layer), "dots" (all but the
            results of matrix products with parameters, and of attention), "offload" (as "layer", while the layers'
            inputs wait in the host's memory).
        attention: kernel of whole-row attention; see `attention.choose`.
        attention_block: queries and keys at a time of splash attention, a multiple of 128.
        mesh: where activations are laid out (see `sharding`); None constrains nothing.
    """

    def __init__(
        self,
        config: Qwen3Config,
        *,
        rngs: nnx.Rngs,
        param_dtype=jnp.float32,
        dtype=None,
        remat: str = "none",
        attention: str = "auto",
        attention_block: int = SPLASH_BLOCK,
        mesh: Mesh | None = None,
    ):
        if remat not in REMAT:
            raise ValueError(f"remat {remat!r} is unknown; use one of {', '.join(REMAT)}")
        if attention not in IMPLEMENTATIONS:
            raise ValueError(f"attention {attention!r} is unknown; use one of {', '.join(IMPLEMENTATIONS)}")
        if attention_block < 1 or attention_block % LANES:
            raise ValueError(f"attention_block={attention_block} must be a multiple of {LANES}")
        if mesh is not None:
            check_divisible(config, mesh)
        self.config = config
        self.dtype = default_dtype() if dtype is None else jnp.dtype(dtype)
        self.remat = remat
        self.attention = attention
        self.attention_block = attention_block
        self.mesh = mesh

        def table() -> nnx.Param:
            init = jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), param_dtype)
            return nnx.Param(init * jnp.asarray(config.initializer_range, param_dtype))

        self.embed_tokens = table()  # [V, D]
        self.layers = Layers(config, rngs=rngs, param_dtype=param_dtype)
        self.norm = nnx.Param(jnp.ones((config.hidden_size,), param_dtype))
        if not config.tie_word_embeddings:
            self.lm_head = table()  # [V, D]

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        cache: KVCache | CacheRows | None = None,
        *,
        window: int | None = None,
    ) -> tuple[jax.Array, KVCache | CacheRows | None]:
        """Hidden states of `tokens`, final norm applied, and the cache with these tokens added.

        Without a cache: causal attention along each row, within equal `segments`; `positions` (for RoPE only)
        default to 0, 1, ... With a cache: token (b, t) is written to slot `positions[b, t]` of row b and attends to
        the slots up to and including it; tokens with positions outside [0, S) are not written (give padding S).

        Args:
            tokens: int32[B, T].
            positions: int32[B, T]; required with a cache.
            segments: int32[B, T], 0 for padding; only without a cache.
            cache: to read and extend.
            window: static; attend to the first `window` cache slots only (all positions must be below it).

        Returns:
            hidden [B, T, D] in `dtype`, and the new cache (None without one).

        Raises:
            ValueError: positions missing with a cache, or segments given with one.
        """
        if cache is None and positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        if cache is not None and positions is None:
            raise ValueError("with a cache, positions [B, T] must say which slot each token goes to")
        if cache is not None and segments is not None:
            raise ValueError("segments are for packed rows without a cache; a cache row is one sequence")

        config = self.config
        angles = self.angles(positions)
        x = self.embed_tokens[...][tokens].astype(self.dtype)
        x = constrain(x, self.mesh, "batch", "length", "hidden")
        arrays, index = self.layers.arrays(), jnp.arange(config.num_hidden_layers, dtype=jnp.int32)

        if cache is None:
            attend = functools.partial(
                self_attention,
                segments=segments,
                implementation=self.attention,
                mesh=self.mesh,
                block=self.attention_block,
            )

            def layer(x, w):
                if self.remat == "offload":
                    x = checkpoint_name(x, _LAYER_INPUT)
                return self._layer(x, w, angles, attend), None

            x, _ = jax.lax.scan(_remat(layer, self.remat), x, arrays)
        else:
            slots = cache.max_length if window is None else min(window, cache.max_length)

            def layer(carry, scanned):
                x, cache = carry
                w, i = scanned

                def attend(q, k, v):
                    nonlocal cache
                    cache = cache.write(i, positions, k, v, self.mesh)
                    return cached_attention(q, *cache.read(i, slots), positions)

                x = self._layer(x, w, angles, attend)
                return (x, cache), None

            (x, cache), _ = jax.lax.scan(layer, (x, cache), (arrays, index))
        return rms_norm(x, self.norm[...], config.rms_norm_eps), cache

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines of RoPE: int32[B, T] -> float32[B, T, Dh / 2] twice."""
        inv_freq, factor = self.config.rope_frequencies()
        angles = positions[..., None].astype(jnp.float32) * inv_freq
        return jnp.cos(angles) * factor, jnp.sin(angles) * factor

    def _layer(self, x, w, angles, attend):
        config, mesh = self.config, self.mesh
        batch, length, _ = x.shape
        project = functools.partial(linear, mesh=mesh)

        def heads(name: str, count: int, axis: str) -> jax.Array:
            out = project(h, w[name]).reshape(batch, length, count, config.head_dim)
            return constrain(out, mesh, "batch", "length", axis, "head_dim")

        h = rms_norm(x, w["input_layernorm"], config.rms_norm_eps)
        q = heads("q_proj", config.num_attention_heads, "heads")
        k = heads("k_proj", config.num_key_value_heads, "kv_heads")
        v = heads("v_proj", config.num_key_value_heads, "kv_heads")
        q = rope(rms_norm(q, w["q_norm"], config.rms_norm_eps), *angles)
        k = rope(rms_norm(k, w["k_norm"], config.rms_norm_eps), *angles)
        out = attend(q, k, v).reshape(batch, length, -1).astype(x.dtype)
        x = x + constrain(project(out, w["o_proj"]), mesh, "batch", "length", "hidden")

        h = rms_norm(x, w["post_attention_layernorm"], config.rms_norm_eps)
        inner = jax.nn.silu(project(h, w["gate_proj"])) * project(h, w["up_proj"])
        inner = constrain(inner, mesh, "batch", "length", "mlp")
        return x + constrain(project(inner, w["down_proj"]), mesh, "batch", "length", "hidden")

    def row_sharding(self, rows: int) -> NamedSharding | None:
        """How a batch of `rows` is spread over the mesh, P(axes); None where all of them lie together."""
        axes = () if self.mesh is None else batch_axes(self.mesh, rows) or ()
        return NamedSharding(self.mesh, P(axes)) if any(self.mesh.shape[axis] > 1 for axis in axes) else None

    def head(self) -> jax.Array:
        """The weights of `logits`, [V, D] in `dtype`: the embedding where it is tied."""
        table = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return table[...].astype(self.dtype)

    def logits(self, hidden: jax.Array, head: jax.Array | None = None) -> jax.Array:
        """float32[..., V] from hidden [..., D]; of the whole (padded) vocabulary. `head` is that of `head()`, which a
        caller with many pieces asks for once."""
        head = self.head() if head is None else head
        return linear(hidden.astype(self.dtype), head, preferred_element_type=jnp.float32, mesh=self.mesh)


def _remat(layer, policy: str):
    if policy == "none":
        return layer
    saved = {
        "layer": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            jax.checkpoint_policies.save_only_these_names(ATTENDED),
        ),
        "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[_LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[policy]
    # Inside a scan there is nothing for common-subexpression elimination to undo, so it need not be prevented.
    return jax.checkpoint(layer, policy=saved, prevent_cse=False)
