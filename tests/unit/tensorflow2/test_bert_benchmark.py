"""The benchmark class, called as PerfZero calls it, and the flags that each of its methods sets."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed (the tf extra)")

from google.protobuf import json_format
from tensorflow.core.util import test_log_pb2

from tf2_bert.bert_benchmark import BertClassifyBenchmarkReal
from tf2_bert.flags import resolve_flags
from tf2_bert.perfzero import BenchmarkTimerCallback, PerfZeroBenchmark, flags_as_text
from unit.tensorflow2.processes import assert_success, start
from unit.tensorflow2.strategies_program import run_benchmark
from user_errors import user_error

Results = Callable[..., list[dict[str, Any]]]
METHODS = ("8_gpu", "short_8_gpu", "short_1_gpu", "4x4_tpu", "short_4x4_tpu", "short_cpu")


@pytest.fixture
def results_of(monkeypatch: pytest.MonkeyPatch) -> Results:
    """Return results_of(replicas, *methods): each method's flags, whether it limits GPU memory,
    and its settings.
    """
    for name in ("CONFIG_FILE", "LOGDIR", "DGXNGPU"):
        monkeypatch.delenv(name, raising=False)

    def of(replicas: int, *methods: str, **arguments: Any) -> list[dict[str, Any]]:
        benchmark = BertClassifyBenchmarkReal(
            "/out", root_data_dir="/data", tpu="a_tpu", **arguments
        )
        before = flags_as_text()
        found = []

        def note(name: str, values: Any, force_gpu_memory_alloc: bool = True) -> None:
            with benchmark.flags_set({**values, "model_dir": benchmark.model_dir(name)}):
                settings = {field: value for field, value, *_ in resolve_flags(replicas).as_table()}
                found.append(
                    {
                        "flags": flags_as_text(),
                        "memory": force_gpu_memory_alloc,
                        "settings": settings,
                    }
                )

        monkeypatch.setattr(benchmark, "_run_and_report_benchmark", note)
        for method in methods:
            getattr(benchmark, f"benchmark_{method}")()
        assert flags_as_text() == before
        return found

    return of


@pytest.mark.slow
def test_harness_finds_the_methods_and_reads_the_result(tmp_path: Path) -> None:
    """As PerfZero does: find the class's methods, run one in its own process,
    and read the result file.
    """
    benchmark = BertClassifyBenchmarkReal(output_dir="/dev/null", root_data_dir="", tpu=None)
    assert {name for name in dir(benchmark) if "benchmark_" in name} == {
        f"benchmark_{name}" for name in METHODS
    }
    assert_success(start(run_benchmark, tmp_path, str(tmp_path), "benchmark_short_cpu"))
    entries = test_log_pb2.BenchmarkEntries()
    entries.ParseFromString(
        (tmp_path / "proto_BertClassifyBenchmarkReal.benchmark_short_cpu").read_bytes()
    )
    (result,) = json_format.MessageToDict(entries, preserving_proto_field_name=True)["entry"]
    assert result["name"] == "BertClassifyBenchmarkReal.benchmark_short_cpu"
    assert result["iters"] == "-1"
    (metric,) = result["metrics"]
    assert metric["name"] == "exp_per_second"
    assert metric["value"] > 0.0
    assert result["wall_time"] > 0.0
    words = result["extras"]["flags"]["string_value"].split()
    assert {
        "--steps_per_loop=5",
        "--optimizer_type=lamb",
        "--device_warmup",
        "--num_train_epochs=1",
    } <= set(words)
    assert len(words) == len({word.partition("=")[0] for word in words})
    summary = json.loads((tmp_path / "benchmark_short_cpu/run_0/summary.json").read_text())
    assert summary["steps"] == 20
    assert (tmp_path / "loops").read_text() == "4"  # exp_per_second counts complete loops


def test_full_gpu_run_has_the_published_flags(results_of: Results) -> None:
    (gpu,) = results_of(8, "8_gpu")
    assert gpu["memory"]
    expected = """
        --bert_config_file=/data/bert_mlperf_data/bert_config.json
        --init_checkpoint=/data/bert_mlperf_data/model.ckpt-28252
        --input_files=/data/tfrecords3_500_parts/part-* --model_dir=/out/benchmark_8_gpu
        --all_reduce_alg=nccl --dtype=fp16 --loss_scale=dynamic --num_gpus=8
        --tf_gpu_thread_mode=gpu_private
        --train_batch_size=440 --num_accumulation_steps=11 --eval_batch_size=48 --do_eval
        --steps_per_loop=1137 --steps_between_eval=1137 --steps_before_eval_start=6819
        --num_steps_per_epoch=8103 --stop_steps=8103 --warmup_steps=0.0 --scale_loss --device_warmup
    """
    assert set(expected.split()) <= set(gpu["flags"].split())
    limits = {
        "train_batch_size": "55",
        "eval_batch_size": "6",
        "max_steps": "8103",
        "target_mlm_accuracy": "0.712",
    }
    assert limits.items() <= gpu["settings"].items()
    assert gpu["settings"]["eval_iter_start_samples"] == str(6822 * 440)


def test_tpu_runs_have_the_published_flags(results_of: Results) -> None:
    whole, short = (found["flags"].split() for found in results_of(32, "4x4_tpu", "short_4x4_tpu"))
    assert {
        "--tpu=a_tpu",
        "--distribution_strategy=tpu",
        "--dtype=bf16",
        "--eval_batch_size=768",
    } <= set(whole)
    assert {
        "--train_batch_size=448",
        "--steps_per_loop=1117",
        "--steps_before_eval_start=6697",
    } <= set(whole)
    assert {"--num_steps_per_epoch=2234", "--steps_per_loop=1117"} <= set(short)
    assert not [word for word in short if word.startswith(("--do_eval", "--init_checkpoint"))]


def test_short_runs_have_few_steps_and_no_evaluation(results_of: Results) -> None:
    _, eight, one = results_of(1, "8_gpu", "short_8_gpu", "short_1_gpu")
    assert {"steps_per_loop": "200", "max_steps": "400"}.items() <= eight["settings"].items()
    assert eight["memory"]
    assert not one["memory"]
    assert {"max_steps": "10", "train_batch_size": "6", "steps_per_loop": "1"}.items() <= one[
        "settings"
    ].items()
    for each in (eight, one):
        assert each["settings"]["do_eval"] == "no"
        assert each["settings"]["init_checkpoint"] == "none"
    # flags of the first method must not leak into the others
    assert "tf_gpu_thread_mode" not in one["flags"]
    assert "device_warmup" not in one["flags"]


def test_flags_given_to_the_class_and_to_its_methods(results_of: Results) -> None:
    default = {
        "seed": "7",
        "dtype": "fp32",
        "benchmark_method_flags": ["eval_batch_size=96", "scale_loss=false"],
    }
    (found,) = results_of(8, "8_gpu", default_flags=default)
    settings = found["settings"]
    assert settings["seed"] == "7"
    assert settings["precision"] == "fp16"  # the method's value overrides a default
    assert settings["eval_batch_size"] == "12"
    assert settings["scale_loss"] == "no"


def test_environment_overrides_constructor_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHMARK_OUTPUT_DIR", "/elsewhere")
    monkeypatch.setenv("BENCHMARK_TPU", "other")
    benchmark = PerfZeroBenchmark(output_dir="/out", tpu="mine", further=1)
    assert benchmark.model_dir("method") == "/elsewhere/method"
    assert benchmark.tpu == "other"
    monkeypatch.delenv("BENCHMARK_OUTPUT_DIR")
    with user_error("config.unsupported", "output_dir"):
        PerfZeroBenchmark(output_dir="gs://bucket/1").model_dir("method")


def test_timer_skips_the_first_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 110.0, 110.0, 112.0, 112.0, 116.0])
    monkeypatch.setattr("tf2_bert.perfzero.time.time", lambda: next(times))
    timer = BenchmarkTimerCallback()
    assert timer.get_examples_per_sec(60) == 0.0
    for loop, steps in enumerate((20, 20, 10)):  # the last is shorter
        timer.on_batch_begin(loop)
        # The third loop has no start of this number, so it counts from the latest one.
        timer.on_batch_end(loop if loop < 2 else 5, {"steps": steps})
        assert (timer.get_examples_per_sec(60) > 0.0) == (loop > 0), "one loop has no speed"
    assert timer.get_longest_loop() == 20
    assert timer.get_examples_per_sec(8 * 20) == pytest.approx(8 * 30 / 6.0)
    assert timer.get_examples_per_sec(8 * 20, num_batches_to_skip=2) == pytest.approx(8 * 10 / 4.0)
    assert timer.get_startup_time(90.0) == 10.0
