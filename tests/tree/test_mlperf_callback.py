"""MLPerfCallback for other training loops: both examples pass the official checkers;
failures and errors.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edited_logs import accuracies
from mlaudit import official
from mlaudit.findings import Finding, Outcome, failed
from mlaudit.logs import Log, read_log
from mlaudit.own_checks import run_checks
from mlaudit.result_set import ResultSet
from mlbert.host.errors import UserError
from mlbert.mlperf.callback import REQUIRED, REQUIRED_IN_CLOSED, MLPerfCallback
from programs import run_quietly
from user_errors import user_error

EXAMPLES = Path("docs/examples")
PACKAGE = Path("benchmarks/bert/implementations/pytorch")
NUMBERS = dict.fromkeys((*REQUIRED, *REQUIRED_IN_CLOSED), 1) | {
    "opt_name": "lamb",
    "seed": 7,
    "global_batch_size": 10,
}


def make(folder: Path, index: int = 0, **more: Any) -> MLPerfCallback:
    arguments = {"submitter": "Org", "system_name": "sys"} | more
    return MLPerfCallback(folder, index, **arguments)


def log_of(callback: MLPerfCallback) -> Log:
    return read_log(callback.path)


def passes(findings: list[Finding]) -> bool:
    return not [
        finding for finding in findings if finding.outcome not in (Outcome.PASS, Outcome.NOTE)
    ]


def run_program(
    tree_root: Path, text_or_path: str | Path, *words: object
) -> subprocess.CompletedProcess[str]:
    given = ["-c", text_or_path] if isinstance(text_or_path, str) else [text_or_path]
    path = os.pathsep.join(
        [str(tree_root / PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environ = {**os.environ, "PYTHONPATH": path, "MLPERF_SUBMISSION_ORG": "Org"}
    return run_quietly(sys.executable, *given, *words, env=environ)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "needs"),
    [("plain", "torch"), ("trainer", "accelerate"), ("lightning", "lightning")],
)
def test_ten_runs_of_an_example_form_a_submission(
    system: str, needs: str, tmp_path: Path, tree_root: Path
) -> None:
    pytest.importorskip(needs, reason="the example needs it")
    example = tree_root / EXAMPLES / f"mlperf_{system}.py"
    assert len(example.read_text().splitlines()) <= 80
    done = run_program(tree_root, example, tmp_path / "Example")
    assert done.returncode == 0, done.stderr[-3000:]
    logs = sorted((tmp_path / "Example/results" / system / "bert").glob("result_*.txt"))
    assert [path.name for path in logs] == [f"result_{index}.txt" for index in range(10)]
    assert passes([official.run(official.compliance_checker(path, path.name))[0] for path in logs])
    assert passes(
        official.run(
            official.system_desc_checker(tmp_path / f"Example/systems/{system}.json", system)
        )
    )
    assert passes(official.run(official.package_checker(tmp_path / "Example")))
    facts = json.loads((tmp_path / f"Example/systems/{system}.json").read_text())
    results = ResultSet([read_log(path) for path in logs], facts, tree=tree_root)
    assert not failed(run_checks(results, "."))
    for log in results.logs:
        # The official checker asks for the other keys of the published logs.
        assert all(map(log.first, ("epoch_start", "eval_start", "eval_stop")))
        assert all(log.first(f"submission_{name}") for name in ("org", "platform", "status"))
        assert (
            [event.key for event in log.events].count("block_start")
            == len(log.all("block_stop"))
            == 1
        )
        *earlier, last = [accuracy for _, accuracy in accuracies(log)]
        assert last >= 0.72 > max(earlier, default=0)


@pytest.mark.parametrize("division", ["open", "closed"])
def test_required_names_satisfy_the_checker_and_missing_ones_are_an_error(
    division: str, tmp_path: Path
) -> None:
    required = [*REQUIRED, *(REQUIRED_IN_CLOSED if division == "closed" else ())]
    with make(tmp_path, division=division) as log:
        log.fit_start({key: NUMBERS[key] for key in required})
        log.eval_start(10)
        assert log.eval_end(10, 0.72)
    assert passes(official.run(official.compliance_checker(log.path, "log")))
    log = make(tmp_path, 1, division=division, hyperparameters={"seed": 1})
    with user_error("config.missing", "hyperparameters") as failure, log:
        log.fit_start({"opt_name": "lamb"})
    assert ", ".join(key for key in required if key not in ("seed", "opt_name")) in str(
        failure.value
    )
    assert log_of(log).status is None, "a run that has not started must not be logged as aborted"


def test_exception_closes_the_log_as_aborted(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), make(tmp_path) as log:  # noqa: PT012
        log.fit_start(NUMBERS)
        log.eval_start(10)
        assert not log.eval_end(10, 0.5)
        raise ZeroDivisionError
    *events, last = log_of(log).events
    assert (last.key, last.metadata["status"], last.metadata["reason"]) == (
        "run_stop",
        "aborted",
        "ZeroDivisionError",
    )
    assert [event.key for event in events[-4:]] == [
        "block_stop",
        "epoch_stop",
        "train_samples",
        "eval_samples",
    ]
    assert passes(official.run(official.compliance_checker(log.path, "log")))


@pytest.mark.parametrize(
    "end", ["", pytest.param("; raise ValueError", marks=pytest.mark.slow), "; sys.exit(3)"]
)
def test_process_exit_closes_the_log(end: str, tmp_path: Path, tree_root: Path) -> None:
    text = (
        "import sys, json; from mlbert.mlperf.callback import MLPerfCallback; "
        "assert 'torch' not in sys.modules;"
    )
    text += (
        "log = MLPerfCallback(sys.argv[1], 3, system_name='sys'); "
        f"log.fit_start(json.loads(sys.argv[2])){end}"
    )
    done = run_program(tree_root, text, tmp_path, json.dumps(NUMBERS))
    assert (done.returncode != 0) == bool(end), done.stderr
    assert read_log(tmp_path / "results/sys/bert/result_3.txt").status == "aborted"


def test_reaching_the_target_exactly_ends_the_run(tmp_path: Path) -> None:
    with make(tmp_path, target=0.5) as log:
        log.fit_start(NUMBERS)
        for samples, accuracy, reached in ((10, 0.4999, False), (20, 0.5, True), (30, 0.1, True)):
            log.eval_start(samples)
            assert log.eval_end(samples, accuracy) is reached
    assert accuracies(log_of(log)) == [(10, 0.4999), (20, 0.5)]
    assert (log_of(log).status, log_of(log).value("train_samples")) == ("success", 20)
    with make(tmp_path, 1, target=0.8) as log:
        log.fit_start(NUMBERS)
    assert log_of(log).status == "aborted"
    assert log_of(log).events[-1].metadata["reason"] == "target 0.8 not reached"
    with make(tmp_path / "rank 1", rank=1) as log:
        log.fit_start(NUMBERS)
        log.eval_start(10)
        assert log.eval_end(10, 0.9), "all ranks see the target"
    assert not (tmp_path / "rank 1").exists(), "only rank 0 writes"


def test_cache_is_cleared_by_a_command_without_a_shell(tmp_path: Path) -> None:
    for index, (command, value) in enumerate(
        [("touch 'a b;c'", True), (["touch", "d"], True), (None, False)]
    ):
        with contextlib.chdir(tmp_path):
            log = make(tmp_path / "out", index, cache_clear_cmd=command)
        log.close()
        assert log_of(log).value("cache_clear") is value
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a b;c", "d", "out"]


def test_invalid_argument_is_an_error_and_writes_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLPERF_SUBMISSION_ORG", raising=False)
    for name, value, code, subject in (
        ("benchmark", "resnet", "config.choice", "benchmark 'resnet'"),
        ("division", "Open", "config.choice", "division 'Open'"),
        ("status", "available", "config.choice", "status 'available'"),
        ("target", 72.0, "config.range", "target 72.0"),
        ("submitter", "", "config.missing", "submitter"),
        ("system_name", "8x A100", "config.value", "system_name '8x A100'"),
        ("system_name", "../x", "config.value", "system_name '../x'"),
        ("cache_clear_cmd", "false", "program.failed", "cache_clear_cmd"),
        ("cache_clear_cmd", "/no/such/program", "program.failed", "cache_clear_cmd"),
        ("cache_clear_cmd", "", "program.failed", "cache_clear_cmd"),
    ):
        change = {name: value}
        with user_error(code, subject):
            make(tmp_path, **change)
        assert not list(tmp_path.rglob("result_*"))


def test_result_is_never_overwritten(tmp_path: Path) -> None:
    with make(tmp_path):
        pass
    with make(tmp_path) as log:  # the first run never started
        log.fit_start(NUMBERS)
    before = log.path.read_bytes()
    with user_error("file.exists", tmp_path / "results/sys/bert/result_0.txt"):
        make(tmp_path)
    assert log.path.read_bytes() == before


def test_existing_system_description_is_kept_and_must_agree(tmp_path: Path) -> None:
    make(tmp_path, status="preview", host_processors_per_node=2).close()
    path = tmp_path / "systems/sys.json"
    facts = json.loads(path.read_text())
    assert (facts["status"], facts["host_processors_per_node"]) == ("Preview", "2")
    path.write_text(json.dumps(facts | {"cooling": "air"}))
    make(tmp_path, 1).close()
    assert json.loads(path.read_text())["cooling"] == "air"
    with user_error("config.conflict", path):
        make(tmp_path, 2, division="closed")
    path.write_text("[]")
    with user_error("file.json", path):
        make(tmp_path, 2)


def test_calls_out_of_order_are_user_errors(tmp_path: Path) -> None:
    cases: list[tuple[list[tuple[Any, ...]], str]] = [
        ([("eval_start", 10)], "eval_start(10)"),
        ([("fit_start", NUMBERS), ("fit_start", NUMBERS)], "fit_start"),
        ([("fit_start", NUMBERS), ("eval_start", 10), ("eval_start", 20)], "eval_start(20)"),
        ([("fit_start", NUMBERS), ("eval_end", 10, 0.5)], "eval_end(10)"),
        ([("fit_start", NUMBERS), ("eval_start", 10), ("eval_end", 20, 0.5)], "eval_end(20)"),
        ([("fit_start", NUMBERS), ("eval_start", 10), ("eval_end", 10, 72.0)], "accuracy 72"),
        (
            [("fit_start", NUMBERS), ("eval_start", 10), ("eval_end", 10, float("nan"))],
            "accuracy nan",
        ),
        (
            [("fit_start", NUMBERS), ("eval_start", 9), ("eval_end", 9, 0.1), ("eval_start", 8)],
            "eval_start(8)",
        ),
    ]
    for index, (calls, subject) in enumerate(cases):
        log = make(tmp_path, index)
        *earlier, (last, *arguments_of_last) = calls
        for name, *arguments in earlier:
            getattr(log, name)(*arguments)
        with (
            user_error(
                "config.range" if subject.startswith("accuracy") else "callback.order", subject
            ),
            log,
        ):
            getattr(log, last)(*arguments_of_last)


def trainer(folder: Path, log: MLPerfCallback, steps: int = 4, **score: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="Hugging Face's Trainer needs it")
    import torch

    shape = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=9, **shape)
    )
    options = transformers.TrainingArguments(
        str(folder / "trainer"),
        max_steps=steps,
        eval_strategy="steps",
        eval_steps=1,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=3,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        warmup_steps=2,
    )
    rows = [{"input_ids": torch.tensor([1, 2, 3]), "labels": 1} for _ in range(48)]
    data = {"train_dataset": rows, "eval_dataset": {"masked": rows[:5], "other": rows[:7]}}
    return transformers.Trainer(model, options, **data, **score, callbacks=[log])


def test_trainer_with_two_evaluation_sets_logs_the_chosen_one(tmp_path: Path) -> None:
    log = make(
        tmp_path, metric_label="eval_masked", metric_name="share", target=0.7, exit_at_target=True
    )
    values = iter([0.1, 0.9, 0.7, 0.9, 0.2, 0.9])
    trainer(tmp_path, log, compute_metrics=lambda _: {"share": next(values)}).train()
    found = log_of(log)
    assert accuracies(found) == [(6, 0.1), (12, 0.7)]
    assert (found.status, found.value("train_samples"), found.value("eval_samples")) == (
        "success",
        12,
        5,
    )
    expected = {
        "global_batch_size": 6,
        "gradient_accumulation_steps": 2,
        "opt_learning_rate_training_steps": 4,
    }
    expected |= {"opt_learning_rate_warmup_steps": 2, "opt_base_learning_rate": 5e-5, "seed": 42}
    assert {key: found.value(key) for key in expected} == expected
    assert [event.key for event in found.events].count("eval_start") == 2


def test_trainer_that_fails_or_misses_the_target_is_logged_as_aborted(tmp_path: Path) -> None:
    names = {"metric_label": "eval_masked", "metric_name": "share"}
    log = make(tmp_path, **names)
    trainer(tmp_path, log, steps=2, compute_metrics=lambda _: {"share": 0.1}).train()
    assert (
        log_of(log).status,
        len(accuracies(log_of(log))),
        log_of(log).value("train_samples"),
    ) == ("aborted", 2, 12)

    def broken(_: object) -> dict[str, float]:
        raise FloatingPointError

    for index, (score, error) in enumerate(
        ((broken, FloatingPointError), (lambda _: {"shore": 0.1}, UserError)), 1
    ):
        log = make(tmp_path, index, **names)
        with pytest.raises(error), log:
            trainer(tmp_path, log, compute_metrics=score).train()
        assert log_of(log).events[-1].metadata["reason"] == error.__name__
