"""The engine against the full forward pass, and a sample's independence of where it ran."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vcppo_jax.models import decode
from vcppo_jax.models.config import model_config
from vcppo_jax.models.decoder import hidden_states
from vcppo_jax.models.heads import logits
from vcppo_jax.models.networks import Policy, logprobs
from vcppo_jax.models.specs import init_params, param_shardings, weight_specs
from vcppo_jax.rollout import engine, plan
from vcppo_jax.rollout.engine import generate
from vcppo_jax.rollout.plan import CHUNK_STEPS, Progress, plan_caches, plan_slots, prompt_bucket
from vcppo_jax.rollout.programs import decode_weights
from vcppo_jax.rollout.sampling import Sampling, sample_token
from vcppo_jax.rollout.slots import new_slots
from vcppo_jax.sharding import make_mesh, rollout_mesh
from vcppo_jax.types import Rollout

VOCAB = 40
CONFIG = model_config(
    {
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 96,
    },
    compute_dtype="float32",
    remat="none",
)
PROMPTS = [
    [3, 1, 4],
    [1, 5, 9, 2, 6, 5, 35, 8, 9, 7, 9, 3, 2],
    [38],
    [4, 6, 2, 6],
    [4, 3, 3, 8, 3, 2],
    [7] * 16,
]
KEY = jax.random.key(11)


def make_policy(seed: int = 0) -> Policy:
    """Weights large enough that the distribution is neither flat nor a spike."""
    params = init_params(weight_specs(CONFIG, head="lm"), jax.random.key(seed))
    return Policy(jax.tree.map(lambda w: w * 6 if w.ndim >= 2 else w, params), CONFIG)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy()


def run(policy: Policy, prompts=PROMPTS, *, steps=12, eos_ids=(), key=KEY, kwargs=None, **rules) -> Rollout:
    sampling = Sampling(max_new_tokens=steps, **rules)
    return generate(policy, prompts, sampling=sampling, key=key, eos_ids=eos_ids, **(kwargs or {}))


def assert_same(a: Rollout, b: Rollout, rows=slice(None)) -> None:
    """Bit-equal tokens; log-probs to rounding."""
    np.testing.assert_array_equal(a.tokens, b.tokens[rows])
    np.testing.assert_array_equal(a.lengths, b.lengths[rows])
    np.testing.assert_array_equal(a.truncated, b.truncated[rows])
    np.testing.assert_allclose(a.logprobs, b.logprobs[rows], atol=3e-5)


@contextlib.contextmanager
def compilations():
    """Counts what XLA compiles inside the block."""
    names: list[str] = []

    def listen(event: str, seconds: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_greedy_is_the_argmax_of_the_full_forward_pass(policy):
    rollout = run(policy, temperature=0)

    @jax.jit
    def next_token(tokens, length):
        hidden = hidden_states(policy.params, CONFIG, tokens[None])
        row = logits(policy.params, CONFIG, hidden[:, length - 1])[0]
        return jnp.argmax(row), jax.nn.log_softmax(row)

    for i, prompt in enumerate(PROMPTS):
        tokens = np.zeros(32, np.int32)
        tokens[: len(prompt)] = prompt
        for t in range(12):
            token, logprob = next_token(tokens, len(prompt) + t)
            assert rollout.tokens[i, t] == token
            np.testing.assert_allclose(rollout.logprobs[i, t], logprob[token], atol=1e-5)
            tokens[len(prompt) + t] = token
    assert len(np.unique(rollout.tokens)) > 5


def test_the_order_of_the_keys_on_accelerators_gives_the_same(policy, monkeypatch):
    """Through every program that touches them: prefill, swap, decoding, growing, shrinking."""
    kwargs = {"batch_size": 4, "limits": np.asarray([60, 60, 3, 8, 5, 40])}
    monkeypatch.setattr(plan, "SMALLEST_CACHE", 16)
    expected = run(policy, steps=60, kwargs=kwargs)
    monkeypatch.setattr(decode, "_keys_slots_last", lambda: False)
    config = dataclasses.replace(CONFIG, remat="full")  # is compiled anew, and means nothing for decoding
    assert decode.empty_cache(config, 3, 64).keys[0].shape == (3, 2, 64, 8)
    assert_same(run(dataclasses.replace(policy, config=config), steps=60, kwargs=kwargs), expected)


def test_logprobs_are_those_of_the_trainer(policy):
    rollout = run(policy, temperature=0.7, top_p=0.8, eos_ids=(0, 1, 2))
    sequences = np.zeros((len(PROMPTS), 32), np.int32)
    for i, prompt in enumerate(PROMPTS):
        response = rollout.tokens[i, : rollout.lengths[i]]
        sequences[i, : len(prompt) + len(response)] = [*prompt, *response]
    expected = np.asarray(jax.jit(lambda p, t: logprobs(p, t, temperature=0.7))(policy, sequences))
    for i, prompt in enumerate(PROMPTS):
        start, length = len(prompt) - 1, rollout.lengths[i]
        np.testing.assert_allclose(
            rollout.logprobs[i, :length], expected[i, start : start + length], atol=1e-5
        )
        np.testing.assert_array_equal(rollout.logprobs[i, length:], 0)


def test_a_sample_does_not_depend_on_batch_slot_or_order(policy):
    everything = run(policy, eos_ids=(0, 7))
    assert_same(run(policy, eos_ids=(0, 7), kwargs={"batch_size": 2}), everything)
    order = np.asarray([4, 0, 5, 2])
    kwargs = {"sample_ids": order, "batch_size": 3}
    shuffled = run(policy, [PROMPTS[i] for i in order], eos_ids=(0, 7), kwargs=kwargs)
    assert_same(shuffled, everything, order)
    # Without the ids the rows are other samples, and another key gives other samples.
    assert (run(policy, [PROMPTS[1], PROMPTS[0]]).tokens[1] != everything.tokens[0]).any()
    assert (run(policy, key=jax.random.key(12)).tokens != everything.tokens).any()


def test_token_t_of_a_sample_is_drawn_with_its_own_key(policy):
    """Each token again, from the full forward pass and `sample_token`; two chunks long."""
    steps, rules = CHUNK_STEPS + 5, Sampling(max_new_tokens=1)
    long = run(policy, steps=steps)
    np.testing.assert_array_equal(run(policy).tokens, long.tokens[:, :12])  # another limit, same samples
    assert long.truncated.all()
    assert (long.lengths == steps).all()

    @jax.jit
    def replay(sequence, length, row):
        hidden = hidden_states(policy.params, CONFIG, sequence[None])[0]
        scores = logits(policy.params, CONFIG, jax.lax.dynamic_slice_in_dim(hidden, length - 1, steps))
        sample_key = jax.random.fold_in(KEY, row)
        keys = jax.vmap(lambda t: jax.random.fold_in(sample_key, t))(jnp.arange(steps))
        return sample_token(scores, keys, rules)[0]

    for row, prompt in enumerate(PROMPTS):
        sequence = np.zeros(64, np.int32)
        sequence[: len(prompt) + steps] = [*prompt, *long.tokens[row]]
        np.testing.assert_array_equal(replay(sequence, len(prompt), row), long.tokens[row])


def test_a_response_ends_with_the_first_of_any_eos_and_none_is_invented(policy):
    eos_ids = (7, 3, 11, 20)
    ends, at_limit, cut = set(), 0, 0
    for seed, pad_id in enumerate((0, 7, 39, 39, 39, 39)):
        kwargs = {"key": jax.random.key(seed), "n": 3}
        free = run(policy, PROMPTS[:4], **kwargs)
        rollout = run(policy, PROMPTS[:4], eos_ids=eos_ids, kwargs={"pad_id": pad_id}, **kwargs)
        for row in range(12):
            stops = np.flatnonzero(np.isin(free.tokens[row], eos_ids))
            length = stops[0] + 1 if len(stops) else 12
            assert rollout.lengths[row] == length
            assert rollout.truncated[row] == (len(stops) == 0)
            np.testing.assert_array_equal(rollout.tokens[row, :length], free.tokens[row, :length])
            assert (rollout.tokens[row, length:] == pad_id).all()
            assert (rollout.logprobs[row, length:] == 0).all()
            ends |= {int(rollout.tokens[row, length - 1])} if len(stops) else set()
            at_limit += len(stops) > 0 and length == 12
            cut += len(stops) == 0
    assert ends == set(eos_ids)
    assert at_limit > 0, "an EOS at the limit was seen, and is not truncated"
    assert cut > 0


@pytest.mark.parametrize("batch_size", [None, 2])
def test_n_samples_share_a_prefill_and_equal_repeated_prompts(policy, batch_size):
    samples = run(policy, PROMPTS[:4], n=3, kwargs={"batch_size": batch_size})
    repeated = run(policy, [p for p in PROMPTS[:4] for _ in range(3)])
    assert_same(samples, repeated)
    assert samples.tokens.shape == (12, 12)
    assert len(np.unique(samples.tokens[:3], axis=0)) == 3


def test_decoding_ends_early_and_reports_progress(policy):
    reports: list[Progress] = []
    kwargs = {"on_progress": reports.append}
    everything = tuple(range(VOCAB))
    rollout = run(policy, eos_ids=everything, kwargs=kwargs | {"batch_size": 2})
    assert rollout.lengths.tolist() == [1] * 6
    assert reports[-1] == Progress(6, 6, 6), "two slots, three times, one step each"

    reports.clear()
    # Five prompts in six slots: a chunk, then the rest.
    rollout = run(policy, PROMPTS[:5], steps=CHUNK_STEPS + 5, eos_ids=(5,), kwargs=kwargs)
    lengths, ended = rollout.lengths, ~rollout.truncated
    first = Progress(
        np.minimum(lengths, CHUNK_STEPS).sum(), (ended & (lengths <= CHUNK_STEPS)).sum(), 6 * CHUNK_STEPS
    )
    assert reports == [first, Progress(lengths.sum(), 5, 6 * lengths.max())]
    assert 0 < first.finished < 5


def test_the_eos_ids_of_the_config_are_the_default(policy):
    known = policy.replace(config=dataclasses.replace(CONFIG, eos_token_ids=(0, 7)))
    assert_same(
        generate(known, PROMPTS, sampling=Sampling(max_new_tokens=12), key=KEY), run(policy, eos_ids=(0, 7))
    )


def test_one_new_token(policy):
    rollout = run(policy, steps=1, temperature=0, eos_ids=(0,))
    np.testing.assert_array_equal(rollout.tokens, run(policy, temperature=0).tokens[:, :1])
    assert rollout.truncated.tolist() == (rollout.tokens[:, 0] != 0).tolist()


def test_compilations_are_known_and_new_weights_need_none(policy):
    rng = np.random.default_rng(0)
    sampling = Sampling(max_new_tokens=7, n=2)

    def generate_random(policy, count):
        prompts = [rng.integers(0, VOCAB, rng.integers(1, 33)).tolist() for _ in range(count)]
        prompts[-1] = prompts[-1][:16]
        generate(policy, prompts, sampling=sampling, key=KEY, eos_ids=(5,), batch_size=10)

    jax.clear_caches()
    with compilations() as first:
        for length in (9, 29):
            generate(policy, [[1] * length] * 5, sampling=sampling, key=KEY, eos_ids=(0,), batch_size=10)
    # The weights' casts, of a layer and of the rest; for each of the buckets 16 and 32 the empty slots, the
    # prefill, the swap, the chunk.
    assert len(first) == 2 + 2 * 4
    others = make_policy(1), make_policy(2)
    with compilations() as second:
        for other in others:
            for count in (5, 14, 10):  # in ten slots, refilled or not
                generate_random(other, count)
    assert len(second) == 0


@pytest.mark.parametrize(
    ("sizes", "decode_tensor", "rules"),
    [
        ({"fsdp": 4, "tensor": 2}, None, {"temperature": 0.0}),
        ({"data": 2, "fsdp": 2, "sequence": 2}, 2, {"n": 3}),
    ],
    ids=str,
)
def test_a_mesh_gives_the_tokens_of_one_device(policy, sizes, decode_tensor, rules, monkeypatch):
    mesh = rollout_mesh(make_mesh(sizes), decode_tensor)
    shardings = param_shardings(weight_specs(CONFIG, head="lm"), make_mesh(sizes))
    sharded = policy.replace(params=jax.device_put(policy.params, shardings))
    cache_specs = set()

    def look_at(state):
        cache_specs.update(str(x.sharding.spec) for x in (*state.cache.keys, *state.cache.values))

    def advance(*args):
        look_at(args[5])
        state, summary = advance_chunk(*args)
        look_at(state)
        return state, summary

    advance_chunk = engine._advance
    prompts = PROMPTS[:4] if rules.get("n") == 3 else PROMPTS
    expected = run(policy, prompts, eos_ids=(0, 7), **rules)
    monkeypatch.setattr(engine, "_advance", advance)
    # With n = 3 and four slots, prompts are read two at a time, which four shards cannot split.
    kwargs = {"mesh": mesh, "batch_size": 2 if "n" in rules else None}
    assert_same(run(sharded, prompts, eos_ids=(0, 7), kwargs=kwargs, **rules), expected)
    assert len(cache_specs) == 1
    assert "fsdp" in min(cache_specs), "rows are split"
    assert "tensor" in min(cache_specs), "kv heads are split"


def test_bfloat16_decodes_what_the_bfloat16_trainer_scores(policy):
    config = dataclasses.replace(CONFIG, compute_dtype="bfloat16")
    low = Policy(policy.params, config)
    rollout = run(low, [PROMPTS[1]] * 4, steps=6)
    assert rollout.logprobs.dtype == np.float32
    sequences = np.concatenate([np.tile(PROMPTS[1], (4, 1)), rollout.tokens], axis=1)
    expected = jax.jit(logprobs)(low, sequences)[:, -6:]
    np.testing.assert_allclose(rollout.logprobs, expected, atol=0.1)


def test_buckets_are_few():
    assert {prompt_bucket(n) for n in range(1, 1025)} == {16, 32, 64, 128, 256, 512, 1024}
    assert all(prompt_bucket(n) >= n for n in range(1, 1025))
    sizes = {plan_slots(prompts, 1, 64, 1, 16, 7).slots[0] for prompts in range(1, 65)}
    assert sizes == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}


@pytest.mark.parametrize(
    ("prompts", "n", "batch_size", "shards", "bucket", "shapes"),
    [
        (512, 1, 256, 1, 32, ((256, 128, 64, 32), 128, 64, 16)),
        (512, 1, 256, 1, 8192, ((256, 128, 64, 32), 1, 64, 16)),
        (512, 1, 256, 8, 1024, ((256, 128, 64, 32), 32, 64, 16)),
        (257, 1, 256, 1, 16, ((256, 128, 64, 32), 256, 64, 16)),
        (3, 1, 256, 1, 16, ((3,), 2, 1, 1)),
        (3, 1, 256, 8, 16, ((8,), 8, 2, 1)),
        (32, 8, 100, 1, 16, ((100, 50, 25), 8, 25, 6)),
        (5, 4, 16, 8, 16, ((16, 8), 8, 4, 1)),
        (2, 9, 8, 4, 16, ((8, 4), 4, 2, 1)),
    ],
)
def test_slots_divide_over_the_shards(prompts, n, batch_size, shards, bucket, shapes):
    planned = plan_slots(prompts, n, batch_size, shards, bucket, 7)
    assert planned[:4] == shapes
    assert all(size % shards == 0 for size in planned.slots)


def test_the_cache_doubles_until_all_have_room():
    assert plan_caches(16, 7) == (23,)
    assert plan_caches(64, 64) == (128,)
    assert plan_caches(64, 256) == (128, 256, 320)
    assert plan_caches(128, 1024) == (256, 512, 1024, 1152)  # 128 has no room for a chunk
    assert plan_caches(512, 512) == (1024,)
    assert plan_caches(512, 16384) == (1024, 2048, 4096, 8192, 16384, 16896)


def test_the_cache_grows_only_when_a_response_needs_it(policy, monkeypatch):
    """Three samples in two slots: the tokens are those with a whole cache from the start."""
    steps, sizes = 70, []
    kwargs = {"batch_size": 2, "limits": [steps, 5, 40]}
    whole = run(policy, PROMPTS[:3], steps=steps, kwargs=kwargs)
    advance_chunk = engine._advance

    def advance(*args):
        sizes.append((args[5].cache.size, int(args[5].cache.lengths.max())))
        return advance_chunk(*args)

    monkeypatch.setattr(engine, "_advance", advance)
    monkeypatch.setattr(plan, "SMALLEST_CACHE", 16)
    assert_same(run(policy, PROMPTS[:3], steps=steps, kwargs=kwargs), whole)
    assert {size for size, _ in sizes} == {64, 86}
    assert all(size == 64 for size, longest in sizes if longest + 1 + CHUNK_STEPS <= 64)
    assert [size for size, _ in sizes] == sorted(size for size, _ in sizes)
    sizes.clear()
    run(policy, PROMPTS[:3], steps=steps, kwargs={"limits": [5, 5, 5]})
    assert {size for size, _ in sizes} == {64}


def test_bad_input_is_named(policy):
    for prompts, message in [
        ([], "at least one prompt"),
        ([[1], []], "prompt 1 is empty"),
        ([[1], [1] * 90], "prompt 1 has 90 tokens.*leave room for 84"),
        ([[1, VOCAB]], f"prompt 0 has token ids 1..{VOCAB}; the vocabulary is 0..{VOCAB - 1}"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(policy, prompts)
    with pytest.raises(
        ValueError, match=r"sample_ids: expected 12 numbers \(6 prompts x n = 2\), got shape \(3,\)"
    ):
        run(policy, n=2, kwargs={"sample_ids": [1, 2, 3]})
    with pytest.raises(ValueError, match="config names no EOS id"):
        generate(policy, PROMPTS, sampling=Sampling(max_new_tokens=2), key=KEY)
    with pytest.raises(ValueError, match="batch_size: expected at least 1, got 0"):
        run(policy, kwargs={"batch_size": 0})
    with pytest.raises(ValueError, match=r"limits: .* from 1 to max_new_tokens = 12, got 0..13"):
        run(policy, kwargs={"limits": [0, 13, 1, 1, 1, 1]})


def test_every_row_may_have_its_own_limit(policy):
    limits = np.asarray([1, 12, 7, 3, 5, 2])
    rollout, whole = run(policy, kwargs={"limits": limits, "batch_size": 4}), run(policy)
    assert rollout.lengths.tolist() == limits.tolist()
    assert rollout.truncated.all()
    for row, limit in enumerate(limits):
        np.testing.assert_array_equal(rollout.tokens[row, :limit], whole.tokens[row, :limit])
        assert not rollout.tokens[row, limit:].any()
        assert not rollout.logprobs[row, limit:].any()


@pytest.mark.parametrize("mesh", [None, {"fsdp": 4, "tensor": 2}], ids=["one device", "fsdp 4 x tensor 2"])
def test_slots_are_refilled_and_shrink(policy, mesh, monkeypatch):
    """Lengths as different as a chain of thought's: most row-steps give a token that is kept."""
    monkeypatch.setattr(engine, "SHRINK_STEPS", 4)
    sizes, advance_chunk = [], engine._advance
    monkeypatch.setattr(engine, "_advance", lambda *args: sizes.append(args[6].size) or advance_chunk(*args))
    rng = np.random.default_rng(3)
    limits = np.minimum(np.exp(1.8 + 0.99 * rng.normal(size=64)).astype(int) + 1, 64)
    prompts = [PROMPTS[i % 5] for i in range(64)]
    params = policy.params
    if mesh is not None:
        mesh = make_mesh(mesh)
        params = jax.device_put(params, param_shardings(weight_specs(CONFIG, head="lm"), mesh))
    reports: list[Progress] = []
    kwargs = {"limits": limits, "batch_size": 16, "mesh": mesh, "on_progress": reports.append}
    rollout = run(policy.replace(params=params), prompts, steps=64, kwargs=kwargs)
    assert rollout.lengths.tolist() == limits.tolist()
    assert set(sizes) == ({16, 8, 4, 2} if mesh is None else {16, 8, 4})
    assert reports[-1].tokens == limits.sum()
    assert reports[-1].finished == 64
    # In batches of sixteen, one after the other, it would be a third.
    static = sum(16 * limits[i : i + 16].max() for i in range(0, 64, 16))
    assert limits.sum() / static < 0.4
    assert limits.sum() / reports[-1].row_steps > (0.88 if mesh is None else 0.75)
    monkeypatch.setattr(engine, "SHRINK_STEPS", 1000)
    assert_same(rollout, run(policy, prompts, steps=64, kwargs={"limits": limits, "batch_size": 64}))


def test_a_prompt_is_read_once(policy, monkeypatch):
    read: list[np.ndarray] = []
    prefill = engine._prefill
    monkeypatch.setattr(engine, "_prefill", lambda *args: read.append(args[2]) or prefill(*args))
    run(policy, n=5, kwargs={"batch_size": 4})
    prompts = [tuple(row[: len(row)]) for batch in read for row in batch]
    assert len(prompts) == len(set(prompts)) == len(PROMPTS)


def test_find_stop_ends_a_response_where_it_says(policy):
    free, looks = run(policy, steps=CHUNK_STEPS + 8), []

    def after_a_nine(tokens, seen):
        looks.append((len(tokens), seen))
        hits = np.flatnonzero(tokens[seen:] == 9)
        return int(seen + hits[0] + 1) if len(hits) else None

    reports: list[Progress] = []
    kwargs = {"find_stop": after_a_nine, "pad_id": 39, "batch_size": 3, "on_progress": reports.append}
    rollout = run(policy, steps=CHUNK_STEPS + 8, kwargs=kwargs)
    ended = 0
    for row in range(6):
        hits = np.flatnonzero(free.tokens[row] == 9)
        length = hits[0] + 1 if len(hits) else CHUNK_STEPS + 8
        assert rollout.lengths[row] == length
        assert rollout.truncated[row] == (len(hits) == 0)
        np.testing.assert_array_equal(rollout.tokens[row, :length], free.tokens[row, :length])
        assert (rollout.tokens[row, length:] == 39).all()
        assert not rollout.logprobs[row, length:].any()
        ended += len(hits) > 0
    assert 0 < ended < 6
    assert any(seen > 0 for _, seen in looks)
    assert reports[-1].tokens == rollout.lengths.sum()


def test_each_response_is_given_once_when_it_has_left_its_slot(policy):
    given, looks = {}, []

    def on_finished(rows, rollout):
        looks.append(len(rows))
        for i, row in enumerate(rows.tolist()):
            assert row not in given
            given[row] = rollout.tokens[i], rollout.lengths[i], rollout.logprobs[i], rollout.truncated[i]

    limits = np.asarray([40, 3, 40, 5, 40, 2])
    kwargs = {"limits": limits, "batch_size": 2, "on_finished": on_finished, "token_budget": 100}
    rollout = run(policy, steps=40, kwargs=kwargs)
    assert sorted(given) == list(range(6))
    assert len(looks) > 2
    for row, fields in given.items():
        expected = rollout.tokens, rollout.lengths, rollout.logprobs, rollout.truncated
        for got, whole in zip(fields, expected):
            np.testing.assert_array_equal(got, whole[row])


def test_a_token_budget_cuts_what_is_under_way_and_leaves_the_rest_empty(policy):
    limits, whole = np.asarray([40, 3, 40, 40, 40, 40]), run(policy, steps=40)
    kwargs = {"limits": limits, "batch_size": 2, "pad_id": 39}
    rollout = run(policy, steps=40, kwargs=kwargs | {"token_budget": 6})
    # Two slots: row 1 ends after three steps, row 2 takes its place; the budget was used up by then.
    assert rollout.lengths.tolist() == [3, 3, 0, 0, 0, 0]
    assert rollout.truncated.all()
    assert (rollout.tokens[2:] == 39).all()
    np.testing.assert_array_equal(rollout.tokens[:2, :3], whole.tokens[:2, :3])
    assert run(policy, steps=40, kwargs=kwargs | {"token_budget": 203}).lengths.tolist() == limits.tolist()
    assert run(policy, steps=40, kwargs=kwargs | {"token_budget": 7}).lengths[2] > 0


def test_the_decode_loop_copies_no_cache():
    config = dataclasses.replace(CONFIG, num_layers=6, head_dim=32)
    params = jax.eval_shape(lambda: init_params(weight_specs(config, head="lm"), KEY))
    weights = jax.eval_shape(functools.partial(decode_weights, config=config), params)
    slots = jax.eval_shape(lambda: new_slots(config, 64, 1024, 512))
    arguments = (KEY, slots, jax.ShapeDtypeStruct((64,), bool), jax.ShapeDtypeStruct((), np.int32))
    sampling, eos_ids = Sampling(max_new_tokens=512), np.zeros(1, np.int32)
    memory = engine._advance.lower(weights, config, sampling, eos_ids, *arguments).compile().memory_analysis()
    cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(slots.cache))
    assert memory.alias_size_in_bytes >= cache, "the cache is donated"
    assert memory.temp_size_in_bytes < 0.05 * cache
