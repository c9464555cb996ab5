"""Batches of texts: what is in them, the same on any number of ranks, exact resume,
and sets that fail.
"""

import itertools
import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from mds_samples import write_samples
from mlbert.config.batch_growth import BatchGrowth, TokenGrowth
from mlbert.data.formats.mds import MdsReader
from mlbert.data.formats.streams import Stream, streams_of
from mlbert.data.formats.token_shards import TokenShards, describe_text, vocabulary_sha256
from mlbert.data.formats.tokenizer import Tokenizer, load_tokenizer
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS
from mlbert.data.loading.masked_text import TextEvalSet, TextSet, TextSource
from mlbert.data.loading.text_run import SHAPES, masking_rate
from mlbert.recipes.sections import settings_by_key
from programs import wait_for
from text_sets import Row, original, random_texts, rows, sample_order, write_texts
from user_errors import user_error

TOKENIZER = load_tokenizer("bert-base-uncased")
TEXTS = random_texts(90, most_words=40)
LENGTH = 16
GLOBAL = 8
RATE = masking_rate("linear", 0.4, 0.1, 50)
MADE: list[TextSource] = []


@pytest.fixture(autouse=True)
def no_thread_stays(own_cache):
    yield
    while MADE:
        MADE.pop().close()


@pytest.fixture(params=["split", "truncate"])
def mode(request) -> str:
    return request.param


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "set", TEXTS)


@pytest.fixture
def vocabulary(tmp_path: Path) -> Tokenizer:
    """Return a tokenizer without any word of the texts."""
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "1", "2"]) + "\n")
    return load_tokenizer(tmp_path / "vocab.txt")


def text_set(folder: Path, mode: str, remote: Path | None = None, tokenizer=TOKENIZER) -> TextSet:
    return TextSet(streams_of("", None, folder, remote and str(remote)), tokenizer, LENGTH, mode)


def make(
    texts,
    mode="",
    rank=0,
    world_size=1,
    *,
    remote=None,
    tokenizer=TOKENIZER,
    lanes=GLOBAL,
    **options,
):
    """Return a source of a folder or a set of texts that is closed after the test."""
    if isinstance(texts, Path):
        texts = text_set(texts, mode, remote, tokenizer)
    options = {
        "shuffle": "py1s",
        "shuffle_seed": 4,
        "canonical_nodes": 2,
        "rate": RATE,
        "seed": 11,
        **options,
    }
    MADE.append(
        TextSource(
            texts,
            sequences_per_step=lanes // world_size,
            rank=rank,
            world_size=world_size,
            **options,
        )
    )
    return MADE[-1]


def eval_set(
    texts: TextSet, num_examples: int | None = None, batch_size: int = 8, **options
) -> TextEvalSet:
    return TextEvalSet(texts, num_examples, batch_size, rate=0.2, seed=1, **options)


def kept(folder: Path) -> list[Path]:
    return list(MdsReader(folder).cache.glob("tokens-*/*.ids"))


def opened(*arguments, **options) -> TextSource:
    source = make(*arguments, **options)
    source.open()
    return source


def steps(sources: list[TextSource], count: int) -> list[list[Row]]:
    """Return the rows of each step over all ranks, sorted by their dropout rows."""
    found = []
    for _ in range(count):
        batches = [batch for source in sources for batch in source.next_step()]
        found.append(
            sorted((row for batch in batches for row in rows(batch)), key=lambda row: row[3])
        )
    return found


def state_of(sources: list[TextSource]) -> dict:
    """Return the saved position of all ranks; each has only its own lanes."""
    states = [source.state_dict() for source in sources]
    lanes = [state.pop("lanes") for state in states]
    assert states == [states[0]] * len(states)
    together = {name: np.sum([mine[name] for mine in lanes], 0).tolist() for name in lanes[0]}
    return json.loads(json.dumps(states[0] | {"lanes": together}))


def pieces_of(text: str, mode: str) -> list[tuple[int, ...]]:
    ids = TOKENIZER.encode(text)
    pieces = [ids[first : first + LENGTH - 2] for first in range(0, len(ids), LENGTH - 2)]
    if mode != "split":
        pieces = pieces[:1] or [[]]
    return [(101, *piece, 102) for piece in pieces]


def test_sequences_are_the_pieces_of_the_texts_in_turn(folder, mode):
    sizes = [
        shard["samples"] for shard in json.loads((folder / "index.json").read_text())["shards"]
    ]
    found = steps([opened(folder, mode)], 40)
    orders = [sample_order(sizes, "py1s", epoch, 2, 4) for epoch in range(8)]
    for lane in range(GLOBAL):
        texts = [TEXTS[text] for order in orders for text in order[lane::GLOBAL].tolist()]
        expected = itertools.chain.from_iterable(pieces_of(text, mode) for text in texts)
        assert [original(step[lane]) for step in found] == [*itertools.islice(expected, 40)]
        assert {step[lane][3] for step in found} == {lane * LENGTH}


def test_positions_of_earlier_steps_are_known(folder, mode):
    source = opened(folder, mode)
    states = []
    for _ in range(6):
        states.append(source.state_dict())
        source.next_step()
    assert [source.state_dict(back) for back in range(6, 0, -1)] == states


def test_masks_follow_the_schedule_and_are_new_in_each_step(folder, mode):
    found = steps([opened(folder, mode, lanes=32, rate=masking_rate("step", 0.6, 0.1, 100))], 100)
    shares = [
        sum(len(places) for step in part for _, places, _, _ in step)
        / sum(len(ids) - 2 for step in part for ids, *_ in step)
        for part in (found[:50], found[50:])
    ]
    assert shares == pytest.approx([0.6, 0.1], rel=0.1)
    again: dict[tuple, set] = {}
    for row in itertools.chain.from_iterable(found[:50]):
        again.setdefault(original(row), set()).add(row[1])
    assert any(len(masks) > 1 for masks in again.values())


def test_a_run_resumes_on_other_ranks_in_the_middle_of_an_epoch(folder, mode):
    expected = steps([opened(folder, mode)], 60)
    found = []
    state = None
    for world_size in (2, 1, 4):
        sources = [
            make(folder, mode, rank, world_size, accumulation=2) for rank in range(world_size)
        ]
        for number, source in enumerate(sources):
            if state and number % 2:  # before and after the set is opened
                source.load_state_dict(state)
            source.open()
            if state and not number % 2:
                source.load_state_dict(state)
        found += steps(sources, 20)
        state = state_of(sources)
        for batches in (source.next_step() for source in sources):
            assert [batch.num_samples for batch in batches] == [GLOBAL // world_size // 2] * 2
    assert found == expected


def in_order(folder: Path, mode: str, count: int) -> list[tuple[int, ...]]:
    """Return the first sequences of a rank: round by round, each lane by lane."""
    found = steps([opened(folder, mode)], -(-count // GLOBAL))
    return [original(row) for step in found for row in step][:count]


def test_a_growing_batch_takes_the_same_sequences_in_smaller_steps(folder, mode):
    growth = BatchGrowth(2, GLOBAL, 9)
    source = opened(folder, mode, growth=growth, accumulation=2)
    expected = in_order(folder, mode, growth.before(14))
    states = []
    found = []
    for step in range(14):
        states.append(source.state_dict())
        batches = source.next_step()
        sizes = [batch.num_samples for batch in batches]
        assert sum(sizes) == growth.size(step)
        assert sizes[:-1] == [GLOBAL // 2] * (len(sizes) - 1)
        read = [row for batch in batches for row in rows(batch)]
        assert len({row[3] for row in read}) == len(read), "dropout rows tell sequences apart"
        found.append(read)
    assert [original(row) for step in found for row in step] == expected
    for step in (1, 5, 12):
        again = make(folder, mode, growth=growth, accumulation=2)
        again.load_state_dict(json.loads(json.dumps(states[step])))
        again.open()
        assert [row for batch in again.next_step() for row in rows(batch)] == found[step]
    with user_error("run.other-settings", folder):
        make(folder, mode, growth=BatchGrowth(3, GLOBAL, 9)).load_state_dict(states[3])


@pytest.mark.parametrize(
    "growth",
    [None, BatchGrowth(1, GLOBAL // 2, 7), TokenGrowth(1, GLOBAL // 2, 20 * LENGTH)],
    ids=["constant", "steps", "tokens"],
)
@pytest.mark.parametrize("most", [2, 30])
def test_packed_steps_fill_their_tokens_with_all_sequences_in_turn(folder, mode, growth, most):
    """On two ranks, resumed in the middle."""
    options = {"packed": most, "growth": growth, "accumulation": 2}
    rows_of = growth or BatchGrowth.constant(GLOBAL // 2)
    tokens = [0, 0]
    sizes = []
    sources = [opened(folder, mode, rank, 2, **options) for rank in range(2)]
    alone = [opened(folder, mode, rank, 2) for rank in range(2)]
    expected = [[original(row) for step in steps([one], 90) for row in step] for one in alone]
    places = [0, 0]
    later = None
    for step in range(12):
        if step == 6:
            later = state_of(sources)
            sources = [make(folder, mode, rank, 2, **options) for rank in range(2)]
            for number, source in enumerate(sources):
                if number:
                    source.open()
                source.load_state_dict(later)
                if not number:
                    source.open()
        numbers = []
        for rank, source in enumerate(sources):
            is_counted = isinstance(rows_of, TokenGrowth)
            left = rows_of.size(2 * tokens[rank] if is_counted else step)
            sizes.append(left)
            for batch in source.next_step():
                room = min(left, GLOBAL // 4)
                left -= room
                read = rows(batch)
                numbers += [row[3] for row in read]
                end = places[rank] + len(read)
                assert [original(row) for row in read] == expected[rank][places[rank] : end]
                places[rank] = end
                tokens[rank] += batch.num_tokens
                following = len(expected[rank][end])
                assert batch.num_tokens <= room * LENGTH
                is_full = batch.num_tokens + following > room * LENGTH
                assert is_full or len(read) == room * most
            assert left == 0
        assert len(set(numbers)) == len(numbers), "dropout rows tell sequences apart"
    assert sizes[-1] == GLOBAL // 2
    assert (sizes[0] < sizes[-1]) == (growth is not None)
    known = {"starts": [1, 1]}
    wrong = [{"starts": [1]}, {"starts": [1, -1]}, {}]
    if isinstance(growth, TokenGrowth):
        wrong += [known, {**known, "tokens": [1, -1]}, {**known, "tokens": [1, 1.5]}]
    for bad in wrong:
        own = ("starts", "tokens")
        kept_lanes = {name: value for name, value in later["lanes"].items() if name not in own}
        with user_error("checkpoint.damaged", folder):
            sources[1].load_state_dict({**later, "lanes": {**kept_lanes, **bad}})


def test_a_position_of_another_run_or_damaged_is_refused(folder, vocabulary):
    source = opened(folder, "split")
    for name, changed in (
        ("seed", {"seed": 12}),
        ("order", {"shuffle_seed": 5}),
        ("order", {"shuffle": None}),
        ("global_sequences", {"lanes": 4}),
        ("data", {"tokenizer": vocabulary}),
    ):
        with user_error("run.other-settings", folder) as caught:
            opened(folder, "split", **changed).load_state_dict(source.state_dict())
        assert f" {name} " in caught.value.problem
    with user_error("checkpoint.damaged", folder):
        source.load_state_dict({**source.state_dict(), "step": 3, "lanes": {"epoch": [0]}})


def test_shards_are_tokenized_ahead(folder):
    source = opened(folder, "truncate")
    source.next_step()
    wait_for(lambda: len(kept(folder)) == len(list(folder.glob("shard*"))))
    source.close()
    assert "tokenize" not in {thread.name for thread in threading.enumerate()}


def test_a_rank_reads_the_shards_of_its_own_nodes(tmp_path, mode):
    """If the number of ranks divides the canonical nodes."""
    folder = write_texts(tmp_path / "set", ["river"] * 800, size_limit=1500)
    shards = len(list(folder.glob("shard*")))
    copies = [tmp_path / f"rank{rank}" for rank in range(4)]
    for rank, copy in enumerate(copies):
        source = opened(copy, mode, rank, 4, remote=folder, canonical_nodes=4)
        for _ in range(800 // GLOBAL):
            source.next_step()
        source.close()
    numbers = [len(list(copy.glob("shard*.mds"))) for copy in copies]
    # A shard may lie in two nodes; the next epoch is looked at.
    assert max(numbers) <= shards / 4 + 3


def test_a_slow_shard_does_not_hold_steps_up(folder, monkeypatch, mode):
    source = opened(folder, mode)
    expected = steps([source], 30)
    source.close()
    shutil.rmtree(kept(folder)[0].parent)
    go_on = threading.Event()
    make_it = TokenShards._tokenized
    monkeypatch.setattr(
        TokenShards, "_tokenized", lambda *words: go_on.wait(30) and make_it(*words)
    )
    source = opened(folder, mode)
    assert steps([source], 30) == expected
    assert not kept(folder)
    go_on.set()
    source.close()


def test_token_sets_are_used_as_they_are(tmp_path):
    samples = [list(range(1000 + 40 * number, 1040 + 40 * number)) for number in range(12)]
    stored = ({"tokens": np.array([101, *sample, 102], "<i8").tobytes()} for sample in samples)
    folder = write_samples(tmp_path / "set", {"tokens": "bytes"}, stored)
    rate = masking_rate("constant", 0.0, 0.0, 1)
    options = {"shuffle": None, "lanes": 4, "canonical_nodes": 1, "rate": rate}
    found = steps([opened(folder, "split", **options)], 3)
    for lane in range(4):
        joined = [number for step in found for number in step[lane][0]]
        assert joined == [101, *samples[lane], 102]
    whole = steps([opened(folder, "truncate", **options)], 1)[0]
    assert [row[0] for row in whole] == [(101, *samples[lane][:15]) for lane in range(4)]


def test_tokens_of_another_vocabulary_are_refused(tmp_path, vocabulary, mode):
    """In training and in evaluation, when the set is described and when it is read."""
    samples = [{"tokens": np.array([2, 5, 6, 3], "<i8").tobytes()}] * GLOBAL
    folder = write_samples(
        tmp_path / "set",
        {"tokens": "bytes"},
        samples,
        vocabulary_sha256=vocabulary_sha256(vocabulary),
    )
    assert len(steps([opened(folder, mode, tokenizer=vocabulary)], 1)[0]) == GLOBAL
    evaluation = eval_set(text_set(folder, mode, tokenizer=vocabulary))
    evaluation.open()
    assert evaluation.num_examples == GLOBAL
    other = text_set(folder, mode)
    for use in (make, eval_set):
        with user_error("vocabulary.mismatch", folder):
            use(other)
    recorded = (folder / "index.json").read_bytes()
    index = json.loads(recorded)
    del index["vocabulary_sha256"]
    (folder / "index.json").write_text(json.dumps(index))
    described = [make(other), eval_set(other)]
    (folder / "index.json").write_bytes(recorded)
    for one in described:
        with user_error("vocabulary.mismatch", folder):
            one.open()


@pytest.mark.parametrize(
    ("num_examples", "batch_size"), [(None, 7), (20, 4), (1, 64), (100_000, 8)]
)
def test_evaluation_has_every_sequence_once(folder, mode, num_examples, batch_size):
    everything = [piece for text in TEXTS for piece in pieces_of(text, mode)]
    for world_size in (1, 3):
        found = []
        masks = {}
        for rank in range(world_size):
            samples = eval_set(
                text_set(folder, mode), num_examples, batch_size, rank=rank, world_size=world_size
            )
            count = min(num_examples or 100_000, len(everything))
            assert mode == "split" or samples.num_examples == count, (
                "texts are counted without being read"
            )
            samples.open()
            assert samples.num_examples == count
            batches = [rows(batch) for batch in samples]
            assert [rows(batch) for batch in samples] == batches
            assert all(len(batch) <= batch_size for batch in batches)
            mine = [row for batch in batches for row in batch]
            found += [original(row) for row in mine]
            masks |= {row[3]: row for row in mine}
        assert found == everything[:num_examples]
        if world_size == 1:
            alone = masks
    assert masks == alone


def test_evaluation_of_unknown_words_or_without_a_batch_is_refused(folder, vocabulary):
    with user_error("vocabulary.other-language", folder):
        eval_set(text_set(folder, "split", tokenizer=vocabulary)).open()
    with user_error("config.range", "EVAL_BATCH_SIZE"):
        eval_set(text_set(folder, "split"), 1, 0)


def test_evaluation_keeps_the_shards_that_it_needs_most_of(folder):
    for count, expected in ((1, 0), (len(TEXTS), len(list(folder.glob("shard*"))))):
        eval_set(text_set(folder, "truncate"), count).open()
        assert len(kept(folder)) == expected


def test_the_texts_of_several_streams(folder: Path, tmp_path: Path, mode: str) -> None:
    other = write_texts(tmp_path / "other", [f"other {text}" for text in TEXTS[:40]])
    streams = [Stream(local=str(folder), repeat=0.5), Stream(local=str(other), repeat=2)]
    texts = TextSet(streams, TOKENIZER, LENGTH, mode)
    assert describe_text(streams, TOKENIZER).num_texts == len(TEXTS) // 2 + 80
    two = [opened(texts, mode, rank, 2, shuffle="py1e") for rank in range(2)]
    assert steps([opened(texts, shuffle="py1e")], 12) == steps(two, 12)
    samples = eval_set(texts)
    samples.open()
    assert samples.num_examples == sum(batch.num_samples for batch in samples)
    assert mode == "split" or samples.num_examples == len(TEXTS) // 2 + 80


def test_identity_is_of_index_and_tokenizer(folder, tmp_path, vocabulary):
    (texts,) = streams_of("", None, folder)
    info = describe_text([texts], TOKENIZER)
    assert info.num_texts == len(TEXTS)
    assert info.identity.startswith("sha256:")
    for shard in folder.glob("shard*"):
        shard.unlink()
    assert describe_text(streams_of("", None, tmp_path / "copy", str(folder)), TOKENIZER) == info
    assert describe_text([texts], vocabulary).identity != info.identity


def test_few_and_empty_texts(folder, tmp_path):
    with user_error("data.too-small", folder):  # fewer texts than sequences of a step
        make(folder, "truncate", lanes=96)
    empty = write_texts(tmp_path / "empty", [""] * 20)
    with user_error("data.too-small", "texts"):
        opened(empty, "split").next_step()
    batch = opened(empty, "truncate").next_step()[0]
    assert [row[:3] for row in rows(batch)] == [((101, 102), (), ())] * GLOBAL
    assert batch.to("cpu").masked_positions.shape == (0,)


def test_quarters():
    assert set(settings_by_key()["masking_schedule"].choices) == set(SHAPES)
    for schedule, expected in {
        "constant": [0.3, 0.3, 0.3, 0.3, 0.3],
        "linear": [0.3, 0.2625, 0.225, 0.1875, 0.15],
        "cosine": [0.3, 0.27803300858899106, 0.225, 0.17196699141100894, 0.15],
        "step": [0.3, 0.3, 0.15, 0.15, 0.15],
    }.items():
        rate = masking_rate(schedule, 0.3, 0.15, 100)
        assert [rate(step) for step in (0, 25, 50, 75, 100)] == pytest.approx(expected, abs=1e-12)
        assert rate(1000) == rate(100)
