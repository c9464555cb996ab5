"""What lies in a LOGDIR when a run begins or goes on: nothing, steps of before, a foreign record, things in the way."""

import hashlib
import json
import os
import shutil

import pytest

from training_settings import run

CHANGES = {
    "no train": lambda state: state.pop("train"),
    "a text": lambda state: state["train"].update(step="2"),
    "no source": lambda state: state.pop("source"),
    "a list for the source": lambda state: state.update(source=[]),
    "no numbers of the optimizer": lambda state: state.update(optimizer={}),
    "another seed": lambda state: state.update(seed=6),
    "no seed": lambda state: state.pop("seed"),
}


def test_resuming_from_nothing_is_reported_and_a_foreign_record_is_refused(tmp_path, capfd):
    """Only a run that made steps needs RESUME; the log of an attempt without any is just set aside."""
    assert run(tmp_path, max_steps=3, save_checkpoint_steps=2, resume=1) == 1
    assert "warning: RESUME=1, but " in capfd.readouterr().out
    assert run(tmp_path, max_steps=3) == 2
    assert "holds a finished run" in capfd.readouterr().err
    folder = tmp_path / "out" / "run_0"
    (folder / "summary.json").unlink()
    assert run(tmp_path, max_steps=3) == 2
    assert "is the log of an unfinished run" in capfd.readouterr().err
    (state,) = (folder / "checkpoints").glob("*/state.json")
    whole = state.read_text()
    for name, change in CHANGES.items():
        record = json.loads(whole)
        change(record["state"])
        del record["record_sha256"]
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
        state.write_text(json.dumps({**record, "record_sha256": digest}))
        assert run(tmp_path, max_steps=3, resume=1) == 2, name
        error = capfd.readouterr().err
        assert error.count("\n") == 1, error
        assert "step_00000002: " in error
    shutil.rmtree(folder)
    assert run(tmp_path, max_steps=1) == 1
    assert len(list((tmp_path / "out").glob("result_0.part*.txt"))) == len(CHANGES)


IN_THE_WAY = {
    "result_0.txt": [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/full")],
    "run_0/metrics.jsonl": [os.mkfifo, os.mkdir],
    "run_0/config.json": [os.mkfifo],
    "run_0/curve.png": [os.mkdir],
    "run_0/weights": [os.mkfifo],
    "run_0/huggingface": [lambda path: path.write_text("x")],
    "run_0/checkpoints": [os.mkfifo],
}


@pytest.mark.parametrize("resume", [0, 1])
@pytest.mark.parametrize("name", IN_THE_WAY)
def test_existing_files_are_reported_before_training(tmp_path, capfd, name, resume):
    for number, make in enumerate(IN_THE_WAY[name]):
        path = tmp_path / str(number) / name
        path.parent.mkdir(parents=True)
        if "run_0" not in name:
            (path.parent / "run_0").mkdir()
        make(path)
        assert run(tmp_path, str(number), max_steps=1, resume=resume) == 2
        error = capfd.readouterr().err
        assert error.count("\n") == 1, error
        assert error.startswith(f"mlbert: error: {path}: is in the way")
