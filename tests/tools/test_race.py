"""tools/race.py: both sides learn from the same data, bad inputs are errors,
and the picture is drawn.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

import race
import race_sides
from mlbert.programs.pretrain_rules import SizeShape, choose
from race_text import EVALUATION, RaceText, read_race
from user_errors import user_error

LENGTH = 16


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> RaceText:
    folder = tmp_path_factory.mktemp("race")
    draw = np.random.default_rng(1)
    words = ["".join(draw.choice(list("abcdefgh"), 3)) for _ in range(40)]
    starts = draw.integers(0, 40, 2000)
    documents = (" ".join(words[(start + i) % 40] for i in range(12)) + ".\n" for start in starts)
    (folder / "text.txt").write_text("\n".join(documents))
    return read_race(folder / "text.txt", folder / "made", 200, LENGTH)


def test_rows_are_full_and_masks_change_in_each_epoch(text: RaceText) -> None:
    assert text.train.shape[1] == LENGTH
    assert not np.isin(
        text.train[:, 1:-1], text.masking.special_ids[:3]
    ).any()  # [PAD], [UNK], [CLS]
    epoch = len(text.train) // 8
    batches = list(islice(text.batches(8, 0.3, seed=1), 2 * epoch))
    assert {len(batch.tokens) for batch in batches} == {8 * LENGTH}
    may_be_masked = 8 * float((~np.isin(text.train, (2, 3))).sum()) / len(text.train)
    share = np.mean([len(batch.masked_labels) for batch in batches]) / may_be_masked
    assert share == pytest.approx(0.3, abs=0.02)
    first, second = (
        np.concatenate([b.tokens for b in part]) for part in (batches[:epoch], batches[epoch:])
    )
    assert not np.array_equal(
        np.sort(first.reshape(-1, LENGTH), 0), np.sort(second.reshape(-1, LENGTH), 0)
    )


def test_every_token_to_predict_is_hidden(text: RaceText) -> None:
    for rows in text.evaluation():
        starts = np.repeat(rows.offsets[:-1], np.diff(rows.masked_offsets))
        assert (rows.tokens[starts + rows.masked_positions] == text.masking.mask_id).all()
    assert text.guesses()["most_frequent_id"] not in text.masking.special_ids


@pytest.mark.slow
def test_both_sides_learn_within_the_time_limit(text: RaceText) -> None:
    """The next word is certain, so a good model is much better than predicting the most frequent
    one.
    """
    choice = choose(10**5, 1.5, "tiny", 6.5e10)
    entries = len(text.unigrams)
    ends = {}

    def own(recipe: race_sides.Recipe) -> tuple[race_sides.Step, Callable[[], float]]:
        return race_sides.ours(text, recipe, 1, torch.float32)

    for name, side in (
        ("ours", own(race_sides.of_rules(choice, entries))),
        ("local", own(race_sides.of_rules(choice, entries, "local"))),
        ("modern", own(race_sides.of_rules(choice, entries, "modern"))),
        ("small", own(race_sides.of_preset("small", entries, 3e-3, 8))),
        (
            "stableadamw",
            own(race_sides.of_rules(replace(choice, optimizer="stableadamw"), entries)),
        ),
        ("bert", race_sides.theirs(text, "bert", SizeShape(1, 64, 200), 2e-3, 1, torch.float32)),
        (
            "modernbert",
            race_sides.theirs(text, "modernbert", SizeShape(1, 64, 200), 2e-3, 1, torch.float32),
        ),
    ):
        points = list(race_sides.race(*side, 1.5))
        assert points[-1]["seconds"] >= 1.5
        assert [p["updates"] for p in points] == sorted(p["updates"] for p in points)
        ends[name] = points[-1]["accuracy"]
    guesses = text.guesses()
    assert min(ends["ours"], ends["local"], ends["stableadamw"]) > 2 * float(
        guesses["most_frequent_accuracy"]
    )
    assert min(ends["bert"], ends["modernbert"]) > 0.5 * float(guesses["most_frequent_accuracy"])


def test_text_that_is_too_small_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three.\n\n" * 60)
    with user_error("data.too-small", tmp_path / "text.txt"):
        read_race(tmp_path / "text.txt", tmp_path / "made", 200, LENGTH)
    with user_error("file.missing", tmp_path / "none"):
        race.choice_of(tmp_path / "none", "2x128", 1.0)


def test_picture_has_a_panel_for_each_size(tmp_path: Path) -> None:
    import race_picture

    record = Path(__file__).parents[2] / "records/2026-11-23_pretrain_epyc-2cpu"
    sizes, bigram = race_picture.read_races(
        [record / "2x128_10min.jsonl", record / "4x256_10min.jsonl"]
    )
    assert round(bigram, 3) == 0.138
    curves = sizes["2x128"]["mlbert, rate 0.003"]
    assert [len(curve) for curve in curves] == [race_sides.EVALUATIONS] * 3
    assert [round(curve[-1]["accuracy"], 3) for curve in curves] == [0.463, 0.462, 0.467]
    race_picture.draw(sizes, bigram, tmp_path / "race.png")
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")
    newer = tmp_path / "newer.jsonl"
    newer.write_text(
        json.dumps({"evaluation": EVALUATION}) + "\n" + (record / "2x128_10min.jsonl").read_text()
    )
    with user_error("data.mixed", newer):
        race_picture.read_races([record / "4x256_10min.jsonl", newer])
