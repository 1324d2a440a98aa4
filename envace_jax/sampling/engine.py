"""The slot engine: prefill, fork, extend and decode over rows of one KV cache.

    state = engine.start()                                            empty slots
    state = engine.prefill(model, state, {0: prompt}, {0: key})       a prompt into a slot
    state = engine.fork(state, 0, [1, 2, 3], keys)                    a group's members: the same prompt, other draws
    state, out = engine.decode(model, state, {0: 100, ...}, params)   sample: {slot: Completion}
    state = engine.extend(model, state, {0: tokens})                  append context to live streams, and decode again

Parameters are passed at each call, so a trainer may donate its own. The state is donated: a call takes it over, and
the caller goes on with what is returned. `generate` drives all of this for a list of prompts, refilling slots as they
finish. All calls of one engine together compile a number of programs that is fixed by its buckets.

On a mesh every process makes the same calls with the same arguments and reads the same results.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models.qwen3 import Layers, Qwen3, Qwen3Config, TakenApart, Unrolled
from models.qwen3.sharding import batch_axes

from . import slots as device
from .buckets import fit, ladder
from .params import Completion, SamplingParams, default_keys, slot_sampling
from .pieces import Piece, Pieces, weights_per_token
from .shapes import Shapes
from .slots import Sampled, Slots
from .streams import Stream

MOST_LAYERS_APART = 8
Params = tuple[nnx.State, Layers | None]  # and the layers once more, taken apart
FEW_WEIGHTS = 4_000_000  # that a token meets: so little arithmetic that padding costs less than a program


class Engine:
    """`slots` streams of up to `max_length` tokens each.

    Args:
        config: the model's architecture.
        slots: rows of the KV cache, i.e. streams decoded together.
        max_length: tokens of a stream, prompt included.
        vocab_size: ids the tokenizer has; none from there on is ever sampled. None: the model's vocabulary.
        mesh: devices to spread slots and heads over; None is one device.
        dtype: of the cache; None is bfloat16 on TPU and GPU, float32 on CPU.
        decode_chunk: most tokens a slot samples between two looks of the host.
        prefill_chunk: most tokens of a prompt that are forwarded at once; longer ones go in pieces.
        prefill_tokens: most tokens, padding included, that one prefill call forwards; bounds its memory.
        min_window: the first of the windows of the cache that attention looks at; each next one is twice as long (on a
            CPU, where attention is what costs, with steps between; for small models from half the cache on).
        compact: decode few active slots as a small batch. Costs the memory of a quarter of the cache (where layers
            are taken apart of half), and two to four times the programs; not on a mesh that spreads slots.
        compile_ahead: compile all programs of a kind when the first of it is needed, so that no later call has to.
        coarse: few programs, much padding. None: on a CPU, for models so small that padding costs less than a program.
    """

    def __init__(
        self,
        config: Qwen3Config,
        *,
        slots: int,
        max_length: int,
        vocab_size: int | None = None,
        mesh: Mesh | None = None,
        dtype=None,
        decode_chunk: int = 128,
        prefill_chunk: int = 512,
        prefill_tokens: int = 8192,
        min_window: int = 256,
        compact: bool = True,
        compile_ahead: bool = False,
        coarse: bool | None = None,
    ):
        if slots < 1 or max_length < 2:
            raise ValueError(f"an engine needs slots >= 1 and max_length >= 2, found slots={slots}, {max_length=}")
        vocab_size = config.vocab_size if vocab_size is None else vocab_size
        if not 0 < vocab_size <= config.vocab_size:
            raise ValueError(f"vocab_size={vocab_size} must lie in 1..{config.vocab_size}, the model's vocabulary")
        default = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        self.config = config
        self.slots = slots
        self.max_length = max_length
        self.vocab_size = vocab_size
        self.mesh = None if mesh is None or mesh.size == 1 else mesh
        self.dtype = jnp.dtype(default if dtype is None else dtype)
        self.decode_chunk = decode_chunk
        on_cpu = jax.default_backend() == "cpu"
        # Layers taken apart are faster on a CPU, and compile as long as there are many.
        self._layered = on_cpu and self.mesh is None and config.num_hidden_layers <= MOST_LAYERS_APART
        # Rows that live on several devices are appended to where they are, all at once.
        axes = None if self.mesh is None else batch_axes(self.mesh, slots)
        self.whole = axes is not None and np.prod([self.mesh.shape[axis] for axis in axes]) > 1
        if coarse is None:
            coarse = self._layered and weights_per_token(config) <= FEW_WEIGHTS
        chunk, factor = min(prefill_chunk, max_length), 4 if coarse else 2
        sizes = ladder(64, chunk, halves=False, factor=8) if coarse else ladder(16, chunk)
        first = max(min_window, max_length // 2) if coarse else min_window
        # A forward pass this small takes less time than compiling another program for a smaller one.
        flops, most = (2e9, 1024) if coarse else (1e9, 512) if on_cpu else (1e12, 512)
        cheap_tokens = min(most, int(flops / (2 * weights_per_token(config))))
        self.shapes = Shapes(
            slots,
            max_length,
            windows=ladder(first, max_length, halves=self._layered),
            pieces=Pieces(slots, sizes, max(prefill_tokens, sizes[-1]), cheap_tokens, self.whole, factor),
            coarse=coarse,
            compact=compact and not self.whole,
            halves=self._layered,
        )
        self.compile_ahead = compile_ahead
        self._take_apart = TakenApart()
        self.compilations = 0  # programs traced so far
        self._ahead: set[str] = set()  # kinds of programs that have been compiled ahead

        self._append = self.jit(self._append_body, static=("graph", "window"), donate=("state",))
        self._fork = self.jit(self._fork_body, static=("window",), donate=("state",))
        self._name = self.jit(self._name_body, donate=("state",))
        self._decode = self.jit(self._decode_body, static=("graph", "window"), donate=("state",))

    def jit(self, body: Callable, static: Sequence[str] = (), donate: Sequence[str] = ()) -> Callable:
        """`jax.jit` for calls by keyword, counted in `compilations`."""

        def counted(**arguments):
            self.compilations += 1  # runs when jax traces: once a program
            return body(**arguments)

        return jax.jit(counted, static_argnames=tuple(static), donate_argnames=tuple(donate))

    # What is compiled.

    def ahead(self, kind: str) -> bool:
        """Whether all programs of a kind are to be compiled now."""
        now = self.compile_ahead and kind not in self._ahead
        self._ahead.add(kind)
        return now

    def pin(self, state: Slots) -> Slots:
        """Keep the state's layout on the mesh, inside a jitted function."""
        return device.pin(state, self.mesh)

    def _append_body(self, graph, params, state, tokens, rows, starts, counts, window):
        model = self.merge(graph, params)
        return self.pin(device.append(model, state, tokens, rows, starts, counts, window))

    def _fork_body(self, state, sources, rows, keys, window):
        return self.pin(device.fork(state, sources, rows, keys, window))

    def _name_body(self, state, rows, keys):
        return self.pin(dataclasses.replace(state, keys=state.keys.at[rows].set(keys, mode="drop")))

    def _decode_body(self, graph, params, state, rows, sampling, budgets, min_tokens, steps, enough, window):
        part, out = device.decode(
            self.merge(graph, params),
            device.take(state, rows, window),
            sampling,
            budgets,
            min_tokens,
            steps,
            enough,
            window=window,
            width=self.decode_chunk,
            vocab_size=self.vocab_size,
            pin_state=self.pin,
        )
        return self.pin(device.put(state, part, rows)), device.everywhere(out, self.mesh)

    # Calls on the slots.

    def start(self) -> Slots:
        """Empty slots."""
        return device.empty_slots(self.config, self.slots, self.shapes.windows, self.dtype, self.mesh, self._layered)

    def prefill(
        self, model: Qwen3, state: Slots, prompts: Mapping[int, np.ndarray], keys: Mapping[int, np.ndarray]
    ) -> Slots:
        """(Re)start slots with a prompt int32[T] each; `keys` are the sequences' keys, uint32[2].

        Raises ValueError for a prompt that is empty, or leaves no room for a token.
        """
        prompts = {self._slot(slot): self._tokens(tokens, f"slot {slot}") for slot, tokens in prompts.items()}
        for slot, tokens in prompts.items():
            self._check_prompt(tokens, f"the prompt for slot {slot}")
        rows, names = self._padded(list(prompts), [keys[slot] for slot in prompts])
        state = self._name(state=state, rows=rows, keys=names)
        return self._forward(model, state, prompts, dict.fromkeys(prompts, 0))

    def fork(
        self, state: Slots, source: int, targets: Sequence[int], keys: Sequence[np.ndarray] | Mapping[int, np.ndarray]
    ) -> Slots:
        """Copy the stream of slot `source` to the slots `targets`, each with its own key (by target, or in order)."""
        keys = [keys[slot] for slot in targets] if isinstance(keys, Mapping) else list(keys)
        return self._fork_all(state, [(source, target) for target in targets], keys)

    def extend(self, model: Qwen3, state: Slots, tokens: Mapping[int, np.ndarray]) -> Slots:
        """Append context int32[T] to live streams; what is cached is neither touched nor computed again.

        Raises ValueError for a slot that is empty, or too full for its tokens.
        """
        lengths = np.asarray(state.lengths)
        tokens = {self._slot(slot): self._tokens(new, f"slot {slot}") for slot, new in tokens.items()}
        for slot, new in tokens.items():
            if lengths[slot] == 0:
                raise ValueError(f"slot {slot} is empty and cannot be extended; prefill it first")
            if lengths[slot] + len(new) > self.max_length:
                raise ValueError(
                    f"slot {slot} holds {lengths[slot]} tokens and cannot take {len(new)} more: max_length is "
                    f"{self.max_length}"
                )
        tokens = {slot: new for slot, new in tokens.items() if len(new)}
        return self._forward(model, state, tokens, {slot: int(lengths[slot]) for slot in tokens})

    def decode(
        self,
        model: Qwen3,
        state: Slots,
        active: Mapping[int, int],
        params: SamplingParams | Mapping[int, SamplingParams],
        steps: int | None = None,
        enough: int | None = None,
    ) -> tuple[Slots, dict[int, Completion]]:
        """Sample in the slots of `active` until each draws a stop id or has drawn its budget, `active[slot]` tokens.

        The budgets stand in for `max_new_tokens`, and are cut to the room that is left; `min_new_tokens` counts from
        here. With `steps`, at most so many tokens a slot are drawn now, with `enough` the call returns when so many
        slots have finished; what can go on then has finish_reason None.
        Raises ValueError for an empty slot.
        """
        params = {slot: params if isinstance(params, SamplingParams) else params[slot] for slot in active}
        lengths = np.asarray(state.lengths)
        for slot in active:
            if lengths[self._slot(slot)] == 0:
                raise ValueError(f"slot {slot} is empty and cannot be decoded; prefill it first")
        work = {
            slot: Stream(params[slot], int(lengths[slot]), self._budget(active[slot], int(lengths[slot])))
            for slot in active
        }
        done = 0
        finished = sum(stream.reason is not None for stream in work.values())
        while finished < min(len(work), enough or len(work)) and (steps is None or done < steps):
            now = self.decode_chunk if steps is None else min(self.decode_chunk, steps - done)
            state = self._chunk(model, state, work, now, None if enough is None else enough - finished)
            done += now
            finished = sum(stream.reason is not None for stream in work.values())
        return state, {slot: stream.completion() for slot, stream in work.items()}

    def generate(
        self,
        model: Qwen3,
        prompts: Sequence[np.ndarray],
        params: SamplingParams | Sequence[SamplingParams],
        progress: Callable[[int, int], None] | None = None,
        keys: Sequence[np.ndarray] | None = None,
        shared: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Continue every prompt int32[T]; more prompts than slots are fine. Those with the largest budgets begin first,
        so that the longest need not go on alone.

        params: for all, or one for each. progress: called with the numbers of finished and of all prompts.
        keys: sequence keys uint32[2], one for each; by default prompt i has `sequence_key(seed, 0, i)`.
        shared: of each, how many tokens from its start other prompts are likely to share; see `prefill_groups`.
        Raises ValueError for a prompt that is empty or leaves no room for a token.
        """
        prompts = [self._tokens(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]
        for i, prompt in enumerate(prompts):
            self._check_prompt(prompt, f"prompt {i}")
        params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many params, or one for all; found {len(params)}")
        if keys is None:
            keys = default_keys([p.seed for p in params])
        results: list[Completion | None] = [None] * len(prompts)
        budgets = [math.inf if p.max_new_tokens is None else p.max_new_tokens for p in params]
        waiting = deque(sorted(range(len(prompts)), key=lambda i: -budgets[i]))
        work: dict[int, Stream] = {}
        owner: dict[int, int] = {}
        state = self.start() if prompts else None
        while waiting or work:
            free = [slot for slot in range(self.slots) if slot not in work]
            fresh = {slot: waiting.popleft() for slot in free[: len(waiting)]}
            if fresh:
                state = self.prefill_groups(
                    model,
                    state,
                    {s: prompts[i] for s, i in fresh.items()},
                    {s: keys[i] for s, i in fresh.items()},
                    None if shared is None else {s: shared[i] for s, i in fresh.items()},
                )
            for slot, i in fresh.items():
                budget = self._budget(params[i].max_new_tokens, len(prompts[i]))
                work[slot], owner[slot] = Stream(params[i], len(prompts[i]), budget), i
            # Refilling costs a look of the host: wait until an eighth of the slots is free, while prompts wait.
            state = self._chunk(model, state, work, self.decode_chunk, max(1, self.slots // 8) if waiting else None)
            for slot in [slot for slot, stream in work.items() if stream.reason is not None]:
                results[owner.pop(slot)] = work.pop(slot).completion()
            if progress is not None:
                progress(len(prompts) - len(waiting) - len(work), len(prompts))
        return results

    def prefill_groups(
        self,
        model: Qwen3,
        state: Slots,
        prompts: Mapping[int, np.ndarray],
        keys: Mapping[int, np.ndarray],
        shared: Mapping[int, int] | None = None,
    ) -> Slots:
        """As `prefill`, but a prompt that several slots share is forwarded once and forked to the others.

        shared: how many tokens from a prompt's start may be so shared, where the rest is its own; by default all.
        """
        prompts = {slot: self._tokens(prompt, f"slot {slot}") for slot, prompt in prompts.items()}
        heads = prompts if shared is None else {slot: p[: max(1, shared[slot])] for slot, p in prompts.items()}
        first: dict[bytes, int] = {}
        copies = []
        for slot, head in heads.items():
            leader = first.setdefault(head.tobytes(), slot)
            if leader != slot:
                copies.append((leader, slot))
        state = self.prefill(model, state, {slot: heads[slot] for slot in first.values()}, keys)
        if copies:
            state = self._fork_all(state, copies, [keys[slot] for _, slot in copies])
        rest = {slot: p[len(heads[slot]) :] for slot, p in prompts.items() if len(p) > len(heads[slot])}
        return self.extend(model, state, rest) if rest else state

    # How it is done.

    def split(self, model: Qwen3) -> tuple[nnx.GraphDef, Params]:
        """The model as jitted functions take it: static structure, traced parameters."""
        graph, params = nnx.split(model)
        apart = self._layered and isinstance(model, Qwen3)
        return graph, (params, self._take_apart(model) if apart else None)

    def merge(self, graph: nnx.GraphDef, params: Params) -> Qwen3 | Unrolled:
        """What `split` took apart, inside a jitted function."""
        params, layers = params
        model = nnx.merge(graph, params)
        return model if layers is None else Unrolled(model, layers)

    def window(self, length: int, rows: np.ndarray | None = None) -> int:
        """The smallest window that a decoding loop over such rows has for `length` tokens."""
        windows = self.shapes.decoding_windows(self.slots if rows is None else len(rows))
        return fit(min(length, self.max_length), windows)

    def rows(self, active: Sequence[int]) -> np.ndarray | None:
        """The slots a decoding loop works on: the active ones, filled up to a bucket with idle ones. None: all.

        When most streams of a batch have ended, the rest should not pay for the whole batch.
        """
        bucket = min(bucket for bucket in self.shapes.decoding_rows() if bucket >= len(active))
        if bucket == self.slots:
            return None
        taken = set(active)
        idle = [slot for slot in range(self.slots) if slot not in taken]
        return np.array([*active, *idle[: bucket - len(active)]], np.int32)

    def decoding_shapes(self) -> Iterator[tuple[np.ndarray | None, int]]:
        """(rows, window) of every decoding loop there can be."""
        for count, window in self.shapes.decoding():
            yield None if count == self.slots else np.arange(count, dtype=np.int32), window

    def _forward(self, model, state, tokens: Mapping[int, np.ndarray], starts: Mapping[int, int]) -> Slots:
        """Append `tokens` from `starts` on, in pieces, pieces of like length together."""
        graph, params = self.split(model)

        def append(state: Slots, piece: Piece, window: int) -> Slots:
            return self._append(
                graph=graph,
                params=params,
                state=state,
                tokens=piece.tokens,
                rows=None if self.whole else piece.rows,
                starts=piece.starts,
                counts=piece.counts,
                window=window,
            )

        if self.ahead("append"):
            for rows, size, window in self.shapes.appending():
                nothing = np.zeros(rows, np.int32)
                nobody = Piece(np.zeros((rows, size), np.int32), nothing + self.slots, nothing, nothing)
                state = append(state, nobody, window)
        for piece in self.shapes.pieces.split(tokens, starts):
            size, longest = piece.tokens.shape[1], int((piece.starts + piece.counts).max())
            goes_on = piece.starts.any()
            window = self.shapes.appending_window(size, longest) if goes_on else self.shapes.fresh_window(size)
            state = append(state, piece, window)
        return state

    def _fork_all(self, state: Slots, pairs: Sequence[tuple[int, int]], keys: Sequence[np.ndarray]) -> Slots:
        """Copy each (source, target); all sources are read before any target is written."""
        if len(pairs) != len(keys):
            raise ValueError(f"{len(pairs)} copies need as many keys, found {len(keys)}")
        lengths = np.asarray(state.lengths)
        sources = [self._slot(source) for source, _ in pairs]
        targets = [self._slot(target) for _, target in pairs]
        if empty := [source for source in sources if lengths[source] == 0]:
            raise ValueError(f"slot {empty[0]} is empty and cannot be forked; prefill it first")
        if len(set(targets)) != len(targets):
            raise ValueError(f"fork targets must differ, found {targets}")
        if self.ahead("fork"):
            for copies, window in self.shapes.forking():
                nobody, none = np.full(copies, self.slots, np.int32), np.zeros((copies, 2), np.uint32)
                state = self._fork(state=state, sources=nobody * 0, rows=nobody, keys=none, window=window)
        bucket = self.shapes.forking_rows(len(pairs))
        rows = np.full(bucket, self.slots, np.int32)
        rows[: len(pairs)] = targets
        names = np.zeros((bucket, 2), np.uint32)
        names[: len(pairs)] = keys
        origin = np.full(bucket, sources[0], np.int32)
        origin[: len(pairs)] = sources
        window = self.shapes.forking_window(int(lengths[sources].max()))
        return self._fork(state=state, sources=origin, rows=rows, keys=names, window=window)

    def _chunk(self, model, state, work: dict[int, Stream], steps: int, enough: int | None = None) -> Slots:
        """Decode the unfinished streams of `work` by at most `steps` tokens, or until `enough` of them finish."""
        live = {slot: stream for slot, stream in work.items() if stream.reason is None}
        budgets, held = np.zeros(self.slots, np.int32), np.zeros(self.slots, np.int32)
        for slot, stream in live.items():
            budgets[slot] = stream.budget - stream.drawn
            held[slot] = max(0, stream.params.min_new_tokens - stream.drawn)
        sampling = slot_sampling(self.slots, {slot: stream.params for slot, stream in live.items()})
        rows = self.rows(list(live))
        if rows is not None:
            sampling, budgets, held = jax.tree.map(lambda x: x[rows], (sampling, budgets, held))
        graph, params = self.split(model)

        def decode(state: Slots, rows, sampling, budgets, held, window: int, steps: int, enough: int):
            return self._decode(
                graph=graph,
                params=params,
                state=state,
                rows=rows,
                sampling=sampling,
                budgets=budgets,
                min_tokens=held,
                steps=np.int32(steps),
                enough=np.int32(enough),
                window=window,
            )

        if self.ahead("decode"):
            for some, window in self.decoding_shapes():
                count = self.slots if some is None else len(some)
                none, greedy = np.zeros(count, np.int32), slot_sampling(count, {}, sampling.stop_ids.shape[1])
                state, _ = decode(state, some, greedy, none, none, window, 0, 1)
        longest = max(s.length + min(steps, s.budget - s.drawn) for s in live.values())
        enough = self.slots + 1 if enough is None else enough
        state, out = decode(state, rows, sampling, budgets, held, self.window(longest, rows), steps, enough)
        out = Sampled(*(np.asarray(x) for x in out))
        for row, slot in enumerate(range(self.slots) if rows is None else rows.tolist()):
            if slot in live:
                live[slot].take(out, row)
        return state

    def _slot(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} does not exist; the engine has slots 0..{self.slots - 1}")
        return int(slot)

    def _tokens(self, tokens, what: str) -> np.ndarray:
        tokens = np.asarray(tokens, np.int32)
        if tokens.ndim != 1:
            raise ValueError(f"{what}: tokens must be int32[T], found shape {tokens.shape}")
        return tokens

    def _check_prompt(self, tokens: np.ndarray, what: str) -> None:
        if not 1 <= len(tokens) < self.max_length:
            raise ValueError(
                f"{what} has {len(tokens)} tokens; it must have at least 1 and leave room for one more within "
                f"max_length={self.max_length}"
            )

    def _budget(self, wanted: int | None, length: int) -> int:
        room = self.max_length - length
        return room if wanted is None else min(wanted, room)

    def _padded(self, rows: list[int], keys: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers and keys padded to the number of slots; the padding's row number is no slot's."""
        index, names = np.full(self.slots, self.slots, np.int32), np.zeros((self.slots, 2), np.uint32)
        index[: len(rows)] = rows
        if rows:
            names[: len(rows)] = np.stack(keys)
        return index, names
