"""The curve that a run leaves: what it says beside the two lines, and that no damaged file beside it ends a run."""

import json

import pytest

from mlbert.runs.run_folder import curve, write_curve

SUMMARY = {"status": "success", "accuracy": 0.25, "seconds_to_train": 9.0, "target_accuracy": 0.235}
STEP = {"kind": "step", "step": 1, "samples": 10, "seconds": 1.0, "loss": 5.0}
EVALUATION = {"kind": "evaluation", "step": 1, "samples": 10, "seconds": 1.5, "eval_accuracy": 0.25}


def test_the_curve_names_run_result_target_and_baselines():
    figure = curve("run_0", [STEP, EVALUATION], SUMMARY, {"bigram": 0.1447})
    assert figure.get_suptitle() == "run_0: success, accuracy 0.2500 after 9.0 s"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["target 0.235", "bigram 0.145"]


@pytest.mark.parametrize(
    ("baselines", "target"),
    [("{", 0.2), ("[1]", 0.2), ('{"bigram_accuracy": "0.1", "most_frequent_accuracy": 1e308}', 0.2), (None, None)],
)
def test_damaged_files_cost_their_part_of_the_picture(tmp_path, baselines, target):
    (tmp_path / "run_0").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "run_0/metrics.jsonl").write_text(f"{json.dumps(STEP)}\nnoise\n{json.dumps(EVALUATION)[:-5]}")
    if baselines is not None:
        (tmp_path / "data/baselines.json").write_text(baselines)
    write_curve(tmp_path / "run_0", SUMMARY | {"target_accuracy": target})
    assert (tmp_path / "run_0/curve.png").read_bytes().startswith(b"\x89PNG")
