"""Attention, chosen in one place.

`self_attention` is the attention of whole rows (training, prefill without a cache): causal, within segments.
`cached_attention` is that of new tokens over a KV cache. Grouped-query heads are never repeated in memory.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from models.qwen3 import sharding

IMPLEMENTATIONS = ("auto", "xla", "splash", "cudnn")
_BLOCK = 128  # queries at a time on a CPU
_PIECES = 4  # of a batch, on a CPU
_LARGE_HEAD = 64  # smaller heads keep the rounding, to the bit, of runs that were published
_BODIES = 16  # blocks of queries in a program, about: what several cores can be given, and a compiler be asked for
ATTENDED = "attended"
LANES = 128  # of a TPU register: splash attention wants block and head sizes in multiples of it
_LONG = 4096  # tokens of a row beyond which the scores of all its queries are more than one wants to hold
_SCORES = 2**25  # of one row over a cache that are held at a time: 128 MB
SPLASH_BLOCK = 512  # queries, and keys, that the kernel takes at a time


def choose(implementation: str, *, length: int, head_dim: int, dtype) -> str:
    """Which kernel runs `self_attention`: "xla", "splash" (TPU) or "cudnn" (GPU).

    `auto` takes the platform's flash kernel where it applies (splash: head_dim a multiple of 128, and at least 128
    tokens; cuDNN: 16-bit types, even length, head_dim a multiple of 8 up to 128) and XLA elsewhere. The platform is
    that of the process; to compile for another one, name the kernel.
    """
    if implementation != "auto":
        return implementation
    platform = jax.default_backend()
    if platform == "tpu" and length >= LANES and head_dim % LANES == 0:
        return "splash"
    if platform == "gpu" and jnp.dtype(dtype).itemsize == 2 and length % 2 == 0 and head_dim in range(8, 129, 8):
        return "cudnn"
    return "xla"


def self_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    *,
    implementation: str = "auto",
    mesh: Mesh | None = None,
    block: int = SPLASH_BLOCK,
) -> jax.Array:
    """Causal attention of each row on itself, tokens seeing only those of their own segment.

    q [B, T, H, Dh], k and v [B, T, Hkv, Dh], segments int32[B, T] or None (one segment a row) -> [B, T, H, Dh].
    `block` is how many queries and keys splash attention takes at a time; a row that it does not divide is padded.
    What a policy of `jax.checkpoint` may keep has the name `ATTENDED`: the result, and splash attention's normalisers.
    """
    kernel = choose(implementation, length=q.shape[1], head_dim=q.shape[3], dtype=q.dtype)
    if kernel == "splash":
        return _splash(q, k, v, segments, mesh, block)
    if kernel == "xla" and jax.default_backend() == "cpu" and q.shape[3] >= _LARGE_HEAD and _blocks(q.shape[1]):
        return _blockwise(q, k, v, segments, _divisor(len(q), _BODIES // _blocks(q.shape[1])) if mesh is None else 1)
    out = _cudnn(q, k, v, segments) if kernel == "cudnn" else _xla_rows(q, k, v, segments, mesh)
    return checkpoint_name(out, ATTENDED)


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    mask = None if segments is None else (segments[:, None, :, None] == segments[:, None, None, :])
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")


def _xla_rows(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, mesh: Mesh | None) -> jax.Array:
    length = q.shape[1]
    if length > _LONG:
        return _xla_in_turn(q, k, v, segments)
    if jax.default_backend() == "cpu" and _blocks(length):
        # Rows apart: XLA's CPU backend runs products that do not depend on one another on several cores, and keeps most
        # of these small ones on one each. Over a mesh the rows of a device would not stay together.
        count = math.gcd(len(q), _PIECES) if mesh is None else 1
        pieces = zip(*([None] * count if x is None else jnp.split(x, count) for x in (q, k, v, segments)), strict=True)
        return jnp.concatenate([_xla_blocks(*piece) for piece in pieces])
    return _xla(q, k, v, _visible(segments, 0, length))


def _visible(segments: jax.Array | None, start: int, end: int) -> jax.Array:
    # bool[B or 1, end - start, end]: which of the keys before `end` the queries from `start` see.
    mask = (jnp.arange(start, end)[:, None] >= jnp.arange(end))[None]
    if segments is not None:
        mask = mask & (segments[:, start:end, None] == segments[:, None, :end])
    return mask


def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    """Attention over cache slots: the token at `positions[b, t]` sees slots 0 .. positions[b, t] of its row.

    q [B, T, H, Dh], k and v as a cache has them, [B, Hkv, S, Dh], positions int32[B, T] -> [B, T, H, Dh].
    """
    slots = k.shape[2]

    def attend(q: jax.Array, positions: jax.Array) -> jax.Array:
        mask = jnp.arange(slots)[None, None, :] <= positions[:, :, None]
        return _xla(q, k, v, mask, heads_first=True)

    batch, length, heads, _ = q.shape
    block = length
    while block % 2 == 0 and heads * block * slots > _SCORES:
        block //= 2
    if block == length:
        return attend(q, positions)
    # Queries in turn: the scores of a long piece over a long cache would not fit beside the cache.
    pieces = (x.reshape(batch, -1, block, *x.shape[2:]).swapaxes(0, 1) for x in (q, positions))
    out = jax.lax.map(lambda piece: attend(*piece), tuple(pieces))
    return out.swapaxes(0, 1).reshape(q.shape)


def _xla(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, *, heads_first: bool = False) -> jax.Array:
    # mask [B or 1, T, S]. A row that sees nothing (padding) gets the mean of v: finite, and nobody reads it.
    batch, length, heads, head_dim = q.shape
    kv_heads, stored = (k.shape[1], "bksd") if heads_first else (k.shape[2], "bskd")
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum(f"btkgd,{stored}->bkgts", q, k, preferred_element_type=jnp.float32) / math.sqrt(head_dim)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum(f"bkgts,{stored}->btkgd", weights, v)
    return out.reshape(batch, length, heads, head_dim)


def _xla_in_turn(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    # Causal attention for long rows: one block of queries after the other, in the backward pass too.
    batch, length = q.shape[:2]
    segments = jnp.ones((batch, length), jnp.int32) if segments is None else segments

    def attend(piece: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        some, at, own = piece
        mask = (at[:, None] >= jnp.arange(length)) & (own[:, :, None] == segments[:, None, :])
        return _xla(some, k, v, mask)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, -length % _BLOCK)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(batch, -1, _BLOCK, *x.shape[2:]).swapaxes(0, 1)

    queries, own = split(q), split(segments)
    at = jnp.arange(len(queries) * _BLOCK).reshape(-1, _BLOCK)
    out = jax.lax.map(jax.checkpoint(attend, prevent_cse=False), (queries, at, own))
    return out.swapaxes(0, 1).reshape(batch, -1, *q.shape[2:])[:, :length]


def _xla_blocks(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    # Causal attention for whole rows on a CPU: queries go in blocks, and a block never touches the keys after it. With
    # heads before length every product is a plain matrix product (measured at [16, 512]: a fifth of `_xla`'s time,
    # forward and backward).
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    blocks = []
    for start in range(0, length, _BLOCK):
        end = start + _BLOCK
        scores = jnp.einsum("bkgtd,bksd->bkgts", q[:, :, :, start:end], k[:, :, :end]) / math.sqrt(head_dim)
        scores = scores.astype(jnp.float32)
        scores = jnp.where(_visible(segments, start, end)[:, None, None], scores, jnp.finfo(jnp.float32).min)
        weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
        out = jnp.einsum("bkgts,bksd->bkgtd", weights.astype(v.dtype), v[:, :, :end])
        blocks.append(out / weights.sum(axis=-1, keepdims=True).astype(out.dtype))
    out = jnp.concatenate(blocks, axis=3)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, head_dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blockwise(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, pieces: int) -> jax.Array:
    # `_xla_blocks` in fewer passes over the scores (0.85 of its time at [8, 256], forward and backward): the mask is
    # added, the heads of a group are rows of one product, and the backward pass knows the result.
    parts = [total / weight.astype(total.dtype) for total, weight in _sums_of_blocks(q, k, v, segments, pieces)]
    count = _blocks(q.shape[1])
    rows = [jnp.concatenate(parts[i : i + count], axis=3) for i in range(0, len(parts), count)]
    return jnp.concatenate([x.transpose(0, 3, 1, 2, 4).reshape(-1, *q.shape[1:]) for x in rows])


def _sums_of_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, pieces: int
) -> list[tuple[jax.Array, jax.Array]]:
    # For each piece of the batch and block of queries: values added up by weight [b, Hkv, G, t, Dh], and the weights
    # [b, Hkv, G, t, 1].
    (batch, length, _, head_dim), kv_heads = q.shape, k.shape[2]
    rows = batch // pieces
    keys, values = (jnp.split(x.swapaxes(1, 2), pieces) for x in (k, v))
    own = [None] * pieces if segments is None else jnp.split(segments, pieces)
    sums = []
    for i, block in enumerate(_split_queries(q / math.sqrt(head_dim), kv_heads, pieces)):
        piece, start = divmod(i * _BLOCK, length)
        end = start + _BLOCK
        hidden = jnp.where(_visible(own[piece], start, end), 0.0, jnp.finfo(jnp.float32).min / 2)
        block = block.reshape(rows, kv_heads, -1, head_dim)
        scores = jnp.einsum("bkqd,bksd->bkqs", block, keys[piece][:, :, :end], preferred_element_type=jnp.float32)
        scores = scores.reshape(rows, kv_heads, -1, _BLOCK, end) + hidden[:, None, None]
        weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
        flat = weights.astype(v.dtype).reshape(rows, kv_heads, -1, end)
        total = jnp.einsum("bkqs,bksd->bkqd", flat, values[piece][:, :, :end])
        sums.append((total.reshape(*weights.shape[:-1], head_dim), weights.sum(axis=-1, keepdims=True)))
    return sums


def _split_queries(x: jax.Array, kv_heads: int, pieces: int) -> list[jax.Array]:
    # [B, T, H, D] -> [B / pieces, Hkv, G, _BLOCK, D] each, the blocks of a piece together.
    split = []
    for piece in jnp.split(x, pieces):
        piece = piece.reshape(*piece.shape[:2], kv_heads, -1, piece.shape[3]).transpose(0, 2, 3, 1, 4)
        split += jnp.split(piece, _blocks(x.shape[1]), axis=3)
    return split


def _blockwise_forward(q, k, v, segments, pieces: int):
    out = checkpoint_name(_blockwise(q, k, v, segments, pieces), ATTENDED)
    return out, (q, k, v, segments, out)


def _blockwise_backward(pieces: int, residuals, gradient: jax.Array):
    # The gradient of total / weight by weight is - gradient x result / weight: the totals are not needed again.
    q, k, v, segments, out = residuals
    sums, pull = jax.vjp(lambda q, k, v: _sums_of_blocks(q, k, v, segments, pieces), q, k, v)
    product = jnp.sum(out.astype(jnp.float32) * gradient.astype(jnp.float32), axis=-1, keepdims=True)
    gradients, products = (_split_queries(x, k.shape[2], pieces) for x in (gradient, product))
    of_sums = [
        (of_total / weight.astype(of_total.dtype), -of_weight / weight)
        for of_total, of_weight, (_, weight) in zip(gradients, products, sums, strict=True)
    ]
    return *pull(of_sums), None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def _splash(
    q, k, v, segments: jax.Array | None, mesh: Mesh | None, block: int = SPLASH_BLOCK, interpret: bool = False
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    length = q.shape[1]
    block = min(block, _round_up(length, LANES))
    missing = _round_up(length, block) - length
    if segments is None:
        segments = jnp.ones(q.shape[:2], jnp.int32)
    if missing:
        # Behind every real token, so that causality alone hides it from them.
        q, k, v, segments = (jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) for x in (q, k, v, segments))

    def local(q, k, v, segments):
        # Per device: [B, T, H, Dh] -> the kernel's [H, T, Dh], batched; it scales nothing itself.
        kernel = _splash_kernel(q.shape[2], q.shape[1], block, interpret)
        q = q * (1.0 / math.sqrt(q.shape[-1]))
        q, k, v = (x.swapaxes(1, 2) for x in (q.astype(k.dtype), k, v))
        out = jax.vmap(kernel)(q, k, v, segments)
        return out.swapaxes(1, 2)

    ids = splash.SegmentIds(q=segments, kv=segments)
    if mesh is not None:
        batch = q.shape[0]
        heads = sharding.activation_spec(mesh, ("batch", "length", "heads", "head_dim"), batch)
        kv = sharding.activation_spec(mesh, ("batch", "length", "kv_heads", "head_dim"), batch)
        rows = sharding.activation_spec(mesh, ("batch", "length"), batch)
        specs = (heads, kv, kv, splash.SegmentIds(q=rows, kv=rows))
        # Pallas calls carry no varying-axes information, so shard_map cannot check it.
        local = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)
    out = local(q, k, v, ids)
    return out[:, :length] if missing else out


def _splash_kernel(heads: int, length: int, block: int, interpret: bool):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((length, length)) for _ in range(heads)])
    make = functools.partial(splash.make_splash_mha, head_shards=1, q_seq_shards=1, interpret=interpret)
    return make(mask=mask, block_sizes=sizes, residual_checkpoint_name=ATTENDED)


def _blocks(length: int) -> int:
    return 0 if length > _LONG or length % _BLOCK else length // _BLOCK


def _divisor(number: int, most: int) -> int:
    return max(n for n in range(1, max(most, 1) + 1) if number % n == 0)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
