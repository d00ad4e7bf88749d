"""Causal attention within segments, with grouped queries, for training, scoring and prefill.

One function, `attention`, over three implementations that never hold scores of [L, L]: cuDNN on NVIDIA
GPUs, splash attention on TPU, and a blocked form that runs everywhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from vcppo_jax.models.blocked_attention import blocked
from vcppo_jax.sharding import axis_shards, context_device, exchange, gather, map_shards

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]

SPLASH_BLOCK = 512
"""Tile of the splash kernels, in queries and in keys; MaxText trains with this size."""
CUDNN_TOKENS_PER_SEGMENT = 256
"""cuDNN's statistics are [B x S, N, L] float32 for rows of up to S segments: S is L / 256, 2 at least.

Rows with more segments are computed by the blocked form.
"""


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    *,
    implementation: str = "auto",
    block: int | None = None,
) -> jax.Array:
    """softmax(Q K^T / sqrt(H)) V: [B, L, N, H].

    `query` [B, L, N, H]; `key` and `value` [B, L, K, H] with N a multiple of K (query head n reads kv head
    n // (N / K)). A position attends to those at or before it with the same `segment_ids` [B, L] int32 (all
    positions when None); the tokens of a segment are neighbours, as in packed rows. Scores and softmax are
    float32.

    `implementation` is "blocked", "cudnn" (float16 or bfloat16; packed rows need a Hopper GPU or newer),
    "splash" (TPU), or "auto", see `choose`. `block` is the number of queries at a time in the blocked form,
    by default `blocked_attention.QUERY_BLOCK`.

    Raises ValueError for another name and where cuDNN cannot compute in the dtype.
    """
    if implementation == "auto":
        implementation = choose(query, packed=segment_ids is not None)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"model.attention: expected auto or one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    if implementation == "blocked":
        kernel: Attend = functools.partial(blocked, block=block)
        # The compiler partitions rows and heads of this form by itself, but not the length.
        kernel = kernel if axis_shards("length") == 1 else _on_each_shard(kernel)
        return kernel(query, key, value, segment_ids)
    return IMPLEMENTATIONS[implementation](query, key, value, segment_ids)


def choose(query: jax.Array, *, packed: bool) -> str:
    """What "auto" is for these queries [B, L, N, H].

    "splash" on TPU; "cudnn" on NVIDIA GPUs where it can compute: 16-bit types, a head width that is a
    multiple of 8 up to 128, and from Hopper on where rows are `packed`; else "blocked".

    The platform is the one that the program is compiled for, read from the mesh in context (`jax.set_mesh`),
    which may be a topology that is not attached, else JAX's default device. `jax.lax.platform_dependent`
    would decide later, but traces all three, and cuDNN cannot be traced where it is not installed.
    """
    device = context_device()
    if device.platform == "tpu":
        return "splash"
    head_dim = query.shape[-1]
    if "NVIDIA" not in device.device_kind.upper() or query.dtype.itemsize != 2:
        return "blocked"
    if head_dim % 8 or head_dim > 128 or (packed and _older_than_hopper()):
        return "blocked"
    return "cudnn"


def _older_than_hopper() -> bool:
    """Whether the attached GPU is; False where none is attached (compiling ahead of time)."""
    if jax.default_backend() != "gpu":
        return False
    return float(jax.devices()[0].compute_capability) < 9.0


def _on_each_shard(kernel: Attend) -> Attend:
    """`kernel` on each device's rows and heads: the compiler does not partition a kernel by itself.

    Where the length axis is split, each device first gives away its part of the length of some heads for the
    whole length of others, and back afterwards (DeepSpeed-Ulysses, arXiv 2309.14509): the kernel sees whole
    rows, and all devices have the same work under the causal mask. No device holds more of the queries than
    before; of keys and values it does where they have fewer heads than there are parts, see `_divide_heads`.
    """

    @functools.wraps(kernel)
    def mapped(
        query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None
    ) -> jax.Array:
        heads, length_parts = query.shape[2], axis_shards("length")
        if query.shape[1] % length_parts:
            length_parts = 1  # such rows are not split
        query, key, value = _divide_heads(query, key, value, axis_shards("act_heads") * length_parts)

        def on_shard(query: jax.Array, key: jax.Array, value: jax.Array, *ids: jax.Array) -> jax.Array:
            if length_parts == 1:
                return kernel(query, key, value, *ids or (None,))
            arrays = [exchange(x, "length", whole=1, split=2) for x in (query, key, value)]
            out = kernel(*arrays, *[gather(x, "length", whole=1) for x in ids] or (None,))
            return exchange(out, "length", whole=2, split=1)

        kv_axes = ("batch", "length", "act_kv_heads", "head_dim")
        axes: list[tuple[str, ...]] = [("batch", "length", "act_heads", "head_dim"), kv_axes, kv_axes]
        arrays = [query, key, value]
        if segment_ids is not None:
            arrays, axes = [*arrays, segment_ids], [*axes, ("batch", "length")]
        return map_shards(on_shard, arrays, axes)[:, :, :heads]

    return mapped


def _divide_heads(
    query: jax.Array, key: jax.Array, value: jax.Array, parts: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The arrays with as many heads as it takes to cut them into `parts` that need nothing of each other.

    Fewer kv heads than parts: each part gets copies of those that its query heads read. Query heads that do
    not divide: every query head gets a kv head of its own, and heads of zeros fill up the last parts.
    """
    heads, kv_heads = query.shape[2], key.shape[2]
    copies = heads // kv_heads if heads % parts else math.lcm(kv_heads, parts) // kv_heads
    if copies > 1:
        key, value = (jnp.repeat(x, copies, axis=2) for x in (key, value))
    if padding := -heads % parts:
        query, key, value = (jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (query, key, value))
    return query, key, value


@_on_each_shard
def cudnn(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """`attention` by cuDNN's fused kernels; packed rows go in as offsets and lengths of their segments."""
    if query.dtype.itemsize != 2:
        raise ValueError(
            f"model.attention=cudnn computes in 16 bits, got {query.dtype}: set model.compute_dtype to "
            "bfloat16, or model.attention to auto or blocked"
        )
    if segment_ids is None:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
    most = max(2, query.shape[1] // CUDNN_TOKENS_PER_SEGMENT)
    offsets, lengths, counts = segment_table(segment_ids, most)
    return jax.lax.cond(
        jnp.all(counts <= most),
        lambda: _cudnn_packed(query, key, value, offsets, lengths),
        # One scan, to compile fast, over blocks so small that this branch does not set the program's memory.
        jax.checkpoint(lambda: blocked(query, key, value, segment_ids, block=32, spans=1)),
    )


def _cudnn_packed(
    query: jax.Array, key: jax.Array, value: jax.Array, offsets: jax.Array, lengths: jax.Array
) -> jax.Array:
    """cuDNN's kernel for ragged rows, which `jax.nn.dot_product_attention` does not offer (jax 0.12)."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    if jax.__version_info__ < (0, 12):
        # These versions place segments in `key` by the stride of `query`: silently wrong with grouped
        # queries (jax-ml/jax#39521).
        groups = query.shape[2] // key.shape[2]
        key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    return fused.dot_product_attention(
        query,
        key,
        value,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=query.shape[-1] ** -0.5,
        mask_type=fused.MaskType.PADDING_CAUSAL,
    )


def segment_table(segment_ids: jax.Array, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(first positions [B, most + 1], lengths [B, most], number [B]) of the segments in each row, int32.

    Runs of equal `segment_ids` [B, L], padding among them; entries beyond a row's last segment are -1, and
    segments beyond `most` are in the number only.
    """
    rows = jnp.arange(segment_ids.shape[0])[:, None]
    positions = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
    starts = jnp.concatenate(
        [jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1
    )
    index = jnp.cumsum(starts, axis=1, dtype=jnp.int32) - 1
    counts = index[:, -1] + 1
    out_of_range = most + 1
    firsts = jnp.full((segment_ids.shape[0], most + 1), -1, jnp.int32)
    slot = jnp.where(starts & (index < most), index, out_of_range)
    firsts = firsts.at[rows, slot].set(positions, mode="drop")
    lengths = jnp.zeros((segment_ids.shape[0], most), jnp.int32).at[rows, index].add(1, mode="drop")
    return firsts, jnp.where(lengths > 0, lengths, -1), counts


@_on_each_shard
def splash(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """`attention` by the splash kernels of JAX, which skip the blocks above the diagonal."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    length, heads, head_dim = query.shape[1:]
    # The kernels read tiles of 128 lanes and whole blocks: rows are padded, at the end, where the causal
    # mask hides the padding from the tokens.
    block = min(SPLASH_BLOCK, -(-length // 128) * 128)
    padding = -length % block

    def by_head(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))), 1, 2)

    mask = kernels.CausalMask((length + padding, length + padding))
    # Forward, then the gradients of keys and values, then that of queries. The fused backward kernel would
    # hold [L / block, N, L, H] of partial gradients.
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    kernel = kernels.make_splash_mha(
        kernels.MultiHeadMask([mask] * heads), block_sizes=sizes, head_shards=1, q_seq_shards=1
    )
    ids = None
    if segment_ids is not None:
        padded = jnp.pad(segment_ids, ((0, 0), (0, padding)))
        ids = kernels.SegmentIds(q=padded, kv=padded)
    # The kernels do not scale the scores.
    scaled = (query.astype(jnp.float32) * head_dim**-0.5).astype(query.dtype)
    out = jax.vmap(kernel)(by_head(scaled), by_head(key), by_head(value), ids)
    return jnp.swapaxes(out, 1, 2)[:, :length].astype(query.dtype)


IMPLEMENTATIONS: dict[str, Attend] = {"blocked": blocked, "cudnn": cudnn, "splash": splash}
"""Name of `model.attention` -> function of query, key, value and segment ids."""
PLATFORMS = {"cudnn": "gpu", "splash": "tpu"}
"""Where an implementation runs that does not run everywhere."""


def check_platform(implementation: str, platform: str) -> None:
    """Raise ValueError where `implementation` does not run on devices of `platform` ("cpu", "gpu", "tpu")."""
    needed = PLATFORMS.get(implementation, platform)
    if platform != needed:
        raise ValueError(
            f"model.attention={implementation} runs on {needed}, the devices here are {platform}: set it to "
            "auto or blocked"
        )
