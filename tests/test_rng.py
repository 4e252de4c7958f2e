"""Numbers from keys and counters; the oracle is NumPy's own Philox."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupipe import rng
from gpupipe.errors import ConfigError
from gpupipe.rng import KEY_DOMAIN, Op, check_seed, first_counter_word, philox, stream, uniforms

WORD = st.integers(0, 2**64 - 1)
# Where 32-bit halves and carries go wrong: around powers of two.
EDGES = st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1])
WORDS = st.tuples(*[WORD | EDGES] * 4)
INDEX = st.integers(0, 2**63 - 1)


def numpy_philox(counter: tuple[int, ...], key: tuple[int, int], n: int = 4) -> np.ndarray:
    """NumPy counts up before it draws, so it starts one below, with a borrow through all 256 bits."""
    below = (sum(word << (64 * place) for place, word in enumerate(counter)) - 1) % 2**256
    words = np.array([(below >> (64 * place)) % 2**64 for place in range(4)], np.uint64)
    return np.random.Philox(counter=words, key=np.array(key, np.uint64)).random_raw(n)


@given(counter=WORDS, key=st.tuples(WORD | EDGES, WORD | EDGES))
def test_philox_any_counter_and_key_equals_numpy(counter, key):
    ours = philox(tuple(np.array([word], np.uint64) for word in counter), key)
    np.testing.assert_array_equal(np.concatenate(ours), numpy_philox(counter, key))


def test_philox_many_at_once_equals_one_by_one():
    counters = np.random.default_rng(0).integers(0, 2**64, (4, 5, 7), np.uint64)
    together = np.stack(philox(tuple(counters), (3, 4)))
    for place in np.ndindex(5, 7):
        one = numpy_philox(tuple(int(word) for word in counters[:, *place]), (3, 4))
        np.testing.assert_array_equal(together[:, *place], one)


def test_philox_arguments_are_left_unchanged():
    counter = tuple(np.arange(4, dtype=np.uint64) + np.uint64(n) for n in range(4))
    before = [word.copy() for word in counter]
    philox(counter, (1, 2))
    np.testing.assert_array_equal(np.stack(counter), np.stack(before))


@given(seed=INDEX, epoch=INDEX, index=INDEX, occurrence=INDEX, op=st.sampled_from(list(Op)), ordinal=st.integers(0, 50))
def test_uniforms_blocks_in_a_row_are_one_numpy_stream(seed, epoch, index, occurrence, op, ordinal):
    blocks = 11
    words = [first_counter_word(op, ordinal, block) for block in range(blocks)]
    ours = uniforms(seed, epoch, np.array([index]), np.array([occurrence]), words)
    assert ours.shape == (blocks, 4, 1)
    raw = numpy_philox((words[0], epoch, index, occurrence), (seed, KEY_DOMAIN), 4 * blocks)
    np.testing.assert_array_equal(ours.ravel(), (raw >> np.uint64(11)) * 2.0**-53)


def test_uniforms_as_doubles_equal_numpys_random():
    words = [first_counter_word(Op.CROP, 0, 0)]
    generator = np.random.Generator(
        np.random.Philox(counter=[words[0] - 1, 2, 3, 4], key=np.array([7, KEY_DOMAIN], np.uint64))
    )
    np.testing.assert_array_equal(uniforms(7, 2, np.array([3]), np.array([4]), words).ravel(), generator.random(4))


def test_uniforms_layout_is_block_number_sample():
    indices, occurrences = np.arange(100, 103), np.array([0, 5, 9])
    words = [first_counter_word(Op.JITTER, 2, 0), first_counter_word(Op.CROP, 0, 3)]
    ours = uniforms(1, 2, indices, occurrences, words)
    assert ours.shape == (2, 4, 3)
    assert ours.dtype == np.float64
    for block, word in enumerate(words):
        for sample in range(3):
            raw = numpy_philox((word, 2, int(indices[sample]), int(occurrences[sample])), (1, KEY_DOMAIN))
            np.testing.assert_array_equal(ours[block, :, sample], (raw >> np.uint64(11)) * 2.0**-53)


def test_uniforms_without_blocks_or_samples_are_empty():
    none = np.array([], np.int64)
    assert uniforms(0, 0, np.arange(5), np.zeros(5, np.int64), []).shape == (0, 4, 5)
    assert uniforms(0, 0, none, none, [first_counter_word(Op.CROP, 0, 0)]).shape == (1, 4, 0)


def test_uniforms_largest_word_stays_below_one(monkeypatch):
    largest = np.full((1, 1), 2**64 - 1, np.uint64)
    monkeypatch.setattr(rng, "philox", lambda *_: (largest,) * 4)
    assert uniforms(0, 0, np.array([0]), np.array([0]), [0]).max() == 1 - 2.0**-53


def test_uniforms_keys_that_differ_anywhere_share_no_number():
    """Not even (a, b) and (b, a), for which `seed + index` and its like give the same stream."""
    seen: dict[float, tuple] = {}
    few = (0, 1, 2, 5)
    for seed in few:
        for epoch in few:
            for op in Op:
                for ordinal in (0, 1):
                    pairs = [(index, occurrence) for index in few for occurrence in few]
                    index, occurrence = (np.array(column) for column in zip(*pairs, strict=True))
                    words = [first_counter_word(op, ordinal, block) for block in (0, 1)]
                    numbers = uniforms(seed, epoch, index, occurrence, words)
                    for sample, pair in enumerate(pairs):
                        for number in numbers[:, :, sample].ravel():
                            key = (seed, epoch, op, ordinal, *pair)
                            assert seen.setdefault(float(number), key) == key
    assert len(seen) == 4 * 4 * len(Op) * 2 * 16 * 8


def test_uniforms_of_neighbouring_keys_are_uncorrelated():
    n = 20_000
    words = [first_counter_word(Op.CROP, 0, 0)]
    along = {
        "index": uniforms(0, 0, np.arange(n), np.zeros(n, np.int64), words)[0],
        "occurrence": uniforms(0, 0, np.zeros(n, np.int64), np.arange(n), words)[0],
        "next epoch": uniforms(0, 1, np.arange(n), np.zeros(n, np.int64), words)[0],
        "next seed": uniforms(1, 0, np.arange(n), np.zeros(n, np.int64), words)[0],
    }
    rows = np.concatenate(list(along.values()))
    assert np.abs(rows.mean(axis=1) - 0.5).max() < 5 * np.sqrt(1 / 12 / n)
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlation).max() < 5 / np.sqrt(n)
    shifted = np.array([np.corrcoef(row[:-1], row[1:])[0, 1] for row in rows])
    assert np.abs(shifted).max() < 5 / np.sqrt(n)


def test_op_values_are_part_of_the_pixels():
    assert {op.name: int(op) for op in Op} == {
        "CROP": 1,
        "HORIZONTAL_FLIP": 2,
        "VERTICAL_FLIP": 3,
        "JITTER": 4,
        "GREYSCALE": 5,
        "SUBSTITUTE": 6,
        "SHARDS": 7,
        "WINDOWS": 8,
        "PADDED_CROP": 9,
        "APPLY": 10,
        "CHOICE": 11,
        "BLUR": 12,
        "SOLARIZE": 13,
        "POSTERIZE": 14,
        "INVERT": 15,
        "AUTOCONTRAST": 16,
        "EQUALIZE": 17,
        "SHARPNESS": 18,
        "ROTATION": 19,
        "AFFINE": 20,
        "TRIVIAL_AUGMENT": 21,
        "RAND_AUGMENT": 22,
        "AUTO_AUGMENT": 23,
        "ERASING": 24,
        "MIXING": 25,
        "FUNCTION": 26,
    }


def test_uniforms_of_a_known_key_never_change():
    """Recorded once: a change here changes the pixels of everybody's runs."""
    found = uniforms(2024, 3, np.array([41]), np.array([1]), [first_counter_word(Op.JITTER, 1, 2)]).ravel()
    raw = numpy_philox(((4 << 32) | (1 << 16) | 2, 3, 41, 1), (2024, 0x67707570697065))
    np.testing.assert_array_equal(found, (raw >> np.uint64(11)) * 2.0**-53)
    assert found[0].hex() == "0x1.f03ba465152c0p-2"


@given(op=st.sampled_from(list(Op)), ordinal=st.integers(0, 2**16 - 1), block=st.integers(0, 2**16 - 1))
def test_first_counter_word_can_be_taken_apart_again(op, ordinal, block):
    word = first_counter_word(op, ordinal, block)
    assert (word >> 32, (word >> 16) & 0xFFFF, word & 0xFFFF) == (op, ordinal, block)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, np.int64(5), np.uint8(3)])
def test_check_seed_integers_from_zero_are_accepted(seed):
    assert check_seed(seed) == int(seed)
    assert type(check_seed(seed)) is int


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64, 1.0, "1", None, True, np.float64(1), [1], np.int64(-3)])
def test_check_seed_all_else_is_refused(seed):
    with pytest.raises(ConfigError, match=r"seed=.* must be an integer from 0 to 2\*\*63 - 1") as caught:
        check_seed(seed)
    assert caught.value.field == "seed"
    assert caught.value.value is seed


@given(seed=INDEX, epoch=INDEX, number=INDEX, op=st.sampled_from(list(Op)))
def test_stream_is_the_words_of_philox_block_after_block(seed, epoch, number, op):
    blocks = 5
    counter = np.array([(first_counter_word(op, 0, block), epoch, number, 0) for block in range(blocks)], np.uint64)
    expected = np.stack(philox(tuple(counter.T), (seed, KEY_DOMAIN)), axis=1).ravel()
    found = stream(op, seed=seed, epoch=epoch, number=number)
    assert [int(found.random_raw()), *found.random_raw(4 * blocks - 1).tolist()] == expected.tolist()
