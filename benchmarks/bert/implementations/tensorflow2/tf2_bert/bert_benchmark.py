"""Pre-training as PerfZero runs it: `tf2_bert.bert_benchmark.BertClassifyBenchmarkReal.<method>`.

The class and its methods have their published names, and the flags are those of Google's MLPerf
v0.7 submission. The metric `exp_per_second` is examples per second, without the first loop of
steps. To run it without PerfZero: ``python -m tf2_bert.bert_benchmark
--benchmark_filter=short_cpu``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tf2_bert.start import require_packages

require_packages()

import tensorflow as tf
from absl import flags

from tf2_bert.flags import define_flags
from tf2_bert.main import run_bert_pretrain
from tf2_bert.perfzero import (
    BenchmarkTimerCallback,
    PerfZeroBenchmark,
    define_method_flags,
    flags_as_text,
    limit_gpu_memory,
)

FLAGS = flags.FLAGS
SHAPES = Path(__file__).resolve().parents[2] / "pytorch" / "configs"
SAMPLES_OF_LOOP = 500_000  # an evaluation follows each loop
SAMPLES_BEFORE_EVAL = 3_000_000

_COMMON: Mapping[str, object] = {
    "max_seq_length": 512,
    "max_predictions_per_seq": 76,
    "num_train_epochs": 1,
    "num_steps_per_epoch": 8103,
    "optimizer_type": "lamb",
    "learning_rate": 4e-4,
    "warmup_steps": 0.0,
    "beta_1": 0.9,
    "beta_2": 0.999,
    "epsilon": 1e-6,
    "weight_decay_rate": 0.01,
    "explicit_allreduce": False,
    "allreduce_bytes_per_pack": 0,
    "scale_loss": True,
    "device_warmup": True,
    "do_eval": True,
    "num_eval_samples": 10_000,
    "stop_threshold": 0.712,
}


def _loops_of(batch: int) -> dict[str, object]:
    loop = math.ceil(SAMPLES_OF_LOOP / batch)
    before = math.ceil(SAMPLES_BEFORE_EVAL / batch)
    return {
        "train_batch_size": batch,
        "steps_per_loop": loop,
        "steps_between_eval": loop,
        "steps_before_eval_start": before,
        "stop_steps": 8103,
    }


def _8_gpu() -> dict[str, object]:
    """Return the flags of a run on 8 GPUs."""
    return {
        **_COMMON,
        **_loops_of(440),
        "distribution_strategy": "mirrored",
        "all_reduce_alg": "nccl",
        "dtype": "fp16",
        "loss_scale": "dynamic",
        "num_gpus": 8,
        "num_accumulation_steps": 11,
        "eval_batch_size": 48,
        "tf_gpu_thread_mode": "gpu_private",
    }


def _4x4_tpu() -> dict[str, object]:
    """Return the flags of a run on 4x4 TPUs."""
    return {
        **_COMMON,
        **_loops_of(448),
        "distribution_strategy": "tpu",
        "dtype": "bf16",
        "eval_batch_size": 768,
    }


def _short(whole: Mapping[str, object], steps_per_loop: int, loops: int = 2) -> dict[str, object]:
    """Return the flags of a run shortened to ``loops`` loops without evaluation."""
    steps = loops * steps_per_loop
    lengths = {
        "steps_per_loop": steps_per_loop,
        "steps_between_eval": steps_per_loop,
        "num_steps_per_epoch": steps,
    }
    return {**whole, **lengths, "stop_steps": steps, "steps_before_eval_start": 0, "do_eval": False}


class BertClassifyBenchmarkReal(PerfZeroBenchmark):
    """Pre-training benchmarks; the misleading class name is the published one."""

    def __init__(
        self,
        output_dir: str | None = None,
        default_flags: Mapping[str, object] | None = None,
        root_data_dir: str | None = None,
        flag_methods: Sequence[Callable[[], None]] | None = None,
        tpu: str | None = None,
        **kwargs: object,
    ) -> None:
        """See `PerfZeroBenchmark`.

        ``root_data_dir`` contains `tfrecords3_500_parts` and `bert_mlperf_data` with
        bert_config.json and model.ckpt-28252.
        """
        methods = (define_flags, *(flag_methods or ()))
        super().__init__(output_dir, default_flags, root_data_dir, methods, tpu, **kwargs)

    def benchmark_8_gpu(self) -> None:
        """Train to the target on 8 GPUs."""
        self._run_and_report_benchmark(
            "benchmark_8_gpu", {**_8_gpu(), **self._data(), **self._start()}
        )

    def benchmark_short_8_gpu(self) -> None:
        """Run two loops of 200 steps on 8 GPUs, from random weights."""
        self._run_and_report_benchmark(
            "benchmark_short_8_gpu", {**_short(_8_gpu(), 200), **self._data()}
        )

    def benchmark_short_1_gpu(self) -> None:
        """Run ten loops of one step of 6 sequences on one GPU, without a memory limit."""
        small = {
            "num_gpus": 1,
            "train_batch_size": 6,
            "num_accumulation_steps": 1,
            "eval_batch_size": 6,
        }
        values = {**_short(_8_gpu(), 1, loops=10), **small, "device_warmup": False, **self._data()}
        values |= {"all_reduce_alg": None, "tf_gpu_thread_mode": None}
        self._run_and_report_benchmark(
            "benchmark_short_1_gpu", values, force_gpu_memory_alloc=False
        )

    def benchmark_4x4_tpu(self) -> None:
        """Train to the target on a TPU v3-32."""
        self._run_and_report_benchmark(
            "benchmark_4x4_tpu", {**_4x4_tpu(), **self._data(), **self._start()}
        )

    def benchmark_short_4x4_tpu(self) -> None:
        """Run two loops on a TPU v3-32, from random weights."""
        loop = math.ceil(SAMPLES_OF_LOOP / 448)
        self._run_and_report_benchmark(
            "benchmark_short_4x4_tpu", {**_short(_4x4_tpu(), loop), **self._data()}
        )

    def benchmark_short_cpu(self) -> None:
        """Run four loops of 5 steps of a tiny model on one CPU with synthetic data:
        a smoke test, not a benchmark.
        """
        values: dict[str, object] = {
            **_short(_COMMON, 5, loops=4),
            "bert_config_file": str(SHAPES / "demo.json"),
            "synthetic_data": "1",
            "distribution_strategy": "one_device",
            "num_gpus": 0,
            "max_seq_length": 64,
            "max_predictions_per_seq": 10,
            "train_batch_size": 32,
            "eval_batch_size": 32,
        }
        self._run_and_report_benchmark("benchmark_short_cpu", values, force_gpu_memory_alloc=False)

    def _data(self) -> dict[str, object]:
        return {
            "bert_config_file": f"{self.root_data_dir}/bert_mlperf_data/bert_config.json",
            "input_files": f"{self.root_data_dir}/tfrecords3_500_parts/part-*",
        }

    def _start(self) -> dict[str, object]:
        return {"init_checkpoint": f"{self.root_data_dir}/bert_mlperf_data/model.ckpt-28252"}

    def _run_and_report_benchmark(
        self, name: str, values: Mapping[str, object], force_gpu_memory_alloc: bool = True
    ) -> None:
        with self.flags_set({**values, "model_dir": self.model_dir(name)}):
            if force_gpu_memory_alloc:
                limit_gpu_memory()
            timer = BenchmarkTimerCallback()
            start = time.time()
            run_bert_pretrain([timer])
            speed = timer.get_examples_per_sec(FLAGS.train_batch_size * timer.get_longest_loop())
            self.report_benchmark(
                iters=-1,
                wall_time=time.time() - start,
                metrics=[{"name": "exp_per_second", "value": speed}],
                extras={"flags": flags_as_text()},
            )


if __name__ == "__main__":
    define_flags()
    define_method_flags()
    tf.test.main()
