"""Training and evaluation text share no document, sentence or near-repeat."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mlbert.data.prepare.corpus import cut, drop_repeats, is_held_out, split
from user_errors import user_error

word = st.sampled_from(
    ["the", "a", "boat", "river", "stone", "lamp", "runs", "near", "far", "old", "new"]
)
sentence = st.lists(word, min_size=3, max_size=9).map(" ".join)
documents = st.lists(st.lists(sentence, min_size=1, max_size=6), max_size=40)


def many(count: int) -> list[list[str]]:
    return [
        [f"Document {n} says word{n} number{i} of its{n * i} own{i}." for i in range(4)]
        for n in range(count)
    ]


@given(documents)
@settings(max_examples=30)
def test_no_sentence_twice_and_none_lost(texts):
    kept, dropped = drop_repeats(texts)
    flat = [sentence for document in kept for sentence in document]
    assert len(flat) == len(set(flat))
    assert set(flat) == {sentence for document in texts for sentence in document}
    assert len(flat) + dropped == sum(map(len, texts))
    in_other_form = [["The lamp is lit.", "the LAMP is lit!"], ["(The lamp is lit)"]]
    assert drop_repeats(in_other_form) == ([["The lamp is lit."]], 2)


def test_holding_out_depends_on_text_and_seed_only():
    texts = many(2000)
    held = [is_held_out(text, 0.05, 0) for text in texts]
    assert 60 <= sum(held) <= 140
    assert held == [is_held_out(text, 0.05, 0) for text in texts]
    assert held != [is_held_out(text, 0.05, 1) for text in texts]
    assert split(reversed(texts), 0.05, 0, max_sentences=32).summary()["eval_documents"] == sum(
        held
    )


def test_near_repeats_leave_the_training_side_and_no_side_is_empty():
    texts = many(100)
    (victim, *_) = split(texts, 0.2, 0, max_sentences=32).evaluation
    copy = ["But " + sentence[0].lower() + sentence[1:] for sentence in victim]
    train_with_copy = next(
        [*copy, f"extra {n}"] for n in range(1000) if not is_held_out([*copy, f"extra {n}"], 0.2, 0)
    )
    corpus = split([*texts, train_with_copy], 0.2, 0, max_sentences=32)
    assert corpus.dropped["near_repeats_of_eval"] >= 4
    assert not {sentence for document in corpus.train for sentence in document} & set(copy)
    for few, share in ((many(3), 1e-9), ([], 0.5)):
        with user_error("data.too-small", "input text"):
            split(few, share, 0, max_sentences=32)


@given(st.lists(sentence, min_size=1, max_size=80), st.integers(1, 40))
def test_cut_pieces_are_short_even_and_whole(document, most):
    pieces = cut(document, most)
    assert [sentence for piece in pieces for sentence in piece] == document
    sizes = {len(piece) for piece in pieces}
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
