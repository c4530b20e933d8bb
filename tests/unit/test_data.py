"""Token files, batches that do not depend on the number of ranks, and what is refused."""

import numpy as np
import pytest

import zeromp as zm
from zeromp.data import Tokens, check_batch, standard_library


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)) * 8)
    return path


def rows_of(tokens, num_ranks, micro, step=3, global_batch=12):
    """Rows of one step in the order of the global batch."""

    def draw(world):
        return [x for x, _ in tokens.batches(step, global_batch, micro, world)]

    micro_batches = zip(*zm.threads(num_ranks, draw), strict=True)
    return np.concatenate([piece for pieces in micro_batches for piece in pieces])


@pytest.mark.parametrize(("num_ranks", "micro"), [(1, 3), (2, 6), (2, 2), (3, 1), (4, 3)])
def test_global_batch_does_not_depend_on_ranks(text, num_ranks, micro):
    tokens = Tokens(text, context=7)
    assert np.array_equal(rows_of(tokens, num_ranks, micro), rows_of(tokens, 1, 12))


def test_targets_are_the_next_tokens(text):
    x, y = next(Tokens(text, context=7).batches(0, 4, 4, zm.alone()))
    assert x.shape == y.shape == (4, 7)
    assert (y == (x + 1) % 256).all()


def test_held_out_rows_come_from_the_end_and_split_over_ranks(text):
    tokens = Tokens(text, context=7, held_out=0.25)
    (whole,) = zm.threads(1, lambda w: tokens.held_out_batch(10, w)[0])
    parts = zm.threads(3, lambda w: tokens.held_out_batch(10, w)[0])
    assert np.array_equal(np.concatenate(parts), whole)
    starts = tokens._starts(1000, tokens.num_train, tokens.tokens.size, -1)
    assert starts.min() >= tokens.num_train == 1536
    assert starts.max() + 7 < tokens.tokens.size
    assert tokens._starts(1000, 0, tokens.num_train, 5).max() + 7 < tokens.num_train


def test_token_file_is_mapped_and_has_its_own_vocabulary(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(500, dtype=np.uint16) % 300)
    tokens = Tokens(tmp_path / "t.npy", context=4)
    assert isinstance(tokens.tokens, np.memmap)
    assert tokens.vocab == 300
    assert Tokens(tmp_path / "t.npy", context=4, vocab=512).vocab == 512


def test_default_corpus_is_the_standard_library():
    files = standard_library()
    assert sum(f.stat().st_size for f in files) > 5e6
    assert not any("site-packages" in f.parts or "test" in f.parts for f in files)


def test_what_is_refused(tmp_path, text):
    np.save(tmp_path / "t.npy", np.zeros((3, 3)))
    for given, words in [
        ({"files": tmp_path / "missing"}, "no such file"),
        ({"files": []}, "no such file: none"),
        ({"files": text, "context": 5000}, "tokens are too few"),
        ({"files": tmp_path / "t.npy"}, "a token file holds a 1-D"),
    ]:
        with pytest.raises(ValueError, match=words):
            Tokens(**{"context": 4, **given})


def test_o100_batch_that_does_not_divide_shows_the_equation():
    assert check_batch(48, 3, 8) == 2
    with pytest.raises(ValueError, match=r"global batch 48 must be micro-batch 5 x 3 ranks.*15"):
        check_batch(48, 5, 3)
