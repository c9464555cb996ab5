"""What PerfZero, the harness of github.com/tensorflow/benchmarks, expects of a class with benchmark methods.

It makes one instance by keyword, sets TEST_REPORT_FILE_PREFIX, calls one method without arguments in a process of its
own, and reads the `BenchmarkEntries` that `report_benchmark` left at that prefix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import tensorflow as tf
from absl import flags
from absl.testing import flagsaver

from mlbert.host.environment import environment
from mlbert.host.errors import UserError

FLAGS = flags.FLAGS
MEMORY_LIMIT = 14_700  # MB of a GPU, as published: what a V100 of 16 GB has to give


class BenchmarkTimerCallback:
    """Times each loop of steps, by its number from 0."""

    def __init__(self) -> None:
        self._starts: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._steps: dict[int, int] = {}

    def on_batch_begin(self, batch: int, logs: object = None) -> None:
        """A loop begins."""
        self._starts[batch] = time.time()

    def on_batch_end(self, batch: int, logs: Mapping[str, int] | None = None) -> None:
        """It has ended, ``logs["steps"]`` steps long; one that was not seen to begin began when the latest did."""
        self._steps[batch] = (logs or {}).get("steps", 1)
        if self._starts:
            self._seconds[batch] = time.time() - self._starts.get(batch, max(self._starts.values()))

    def get_examples_per_sec(self, batch_size: int, num_batches_to_skip: int = 1) -> float:
        """``batch_size`` examples of the longest loop, and as many in proportion of shorter ones, over the seconds of
        all; 0.0 where no loop is left to count."""
        counted = {batch: spent for batch, spent in self._seconds.items() if batch >= num_batches_to_skip}
        loops = sum(self._steps[batch] for batch in counted) / max(self.get_longest_loop(), 1)
        return batch_size * loops / sum(counted.values()) if counted else 0.0

    def get_longest_loop(self) -> int:
        """Steps of the longest loop, which an evaluation or the end may have cut short of --steps_per_loop."""
        return max(self._steps.values(), default=0)

    def get_startup_time(self, program_start_time: float) -> float:
        """Seconds from ``program_start_time``, of time.time(), to the first loop; 0.0 before it."""
        return min(self._starts.values()) - program_start_time if self._starts else 0.0


class PerfZeroBenchmark(tf.test.Benchmark):
    """A class with benchmark methods, each of which runs with flags of its own."""

    def __init__(
        self,
        output_dir: str | None = None,
        default_flags: Mapping[str, object] | None = None,
        root_data_dir: str | None = None,
        flag_methods: Sequence[Callable[[], None]] | None = None,
        tpu: str | None = None,
        **kwargs: object,
    ) -> None:
        """
        Args:
            output_dir: each method's results lie in a folder of its name below it; BENCHMARK_OUTPUT_DIR wins.
            default_flags: name -> value, for every method that does not set the flag itself.
            root_data_dir: where the data lie.
            flag_methods: what defines the flags.
            tpu: name or address of a TPU; BENCHMARK_TPU wins.
            kwargs: what other benchmark classes are given; nobody reads it here.
        """
        # TensorFlow's own constructor is left out: it changes the process's thread pools, which no other run does.
        self.output_dir = environment().get("BENCHMARK_OUTPUT_DIR") or output_dir or "/tmp"
        self.tpu = environment().get("BENCHMARK_TPU") or tpu
        self.root_data_dir = root_data_dir or ""
        self.default_flags = dict(default_flags or {})
        self.flag_methods = tuple(flag_methods or ())

    def model_dir(self, name: str) -> str:
        """Where the method of this name leaves its results. Raises UserError for a bucket."""
        if "://" in self.output_dir:
            remedy = "Leave out --scratch_gcs_url; --output_gcs_url copies the results at the end"
            raise UserError(
                "config.unsupported", "output_dir", f"{self.output_dir} is not a folder of this machine", remedy
            )
        return f"{self.output_dir}/{name}"

    @contextmanager
    def flags_set(self, values: Mapping[str, object]) -> Iterator[None]:
        """Within it flags have ``values``, above `default_flags` and below --benchmark_method_flags; then, what they
        had before."""
        for define in (*self.flag_methods, define_method_flags):
            define()
        if not FLAGS.is_parsed():
            FLAGS(["perfzero"])  # the words on the command line are PerfZero's
        with flagsaver.flagsaver():
            for name, value in {**self.default_flags, **({"tpu": self.tpu} if self.tpu else {}), **values}.items():
                setattr(FLAGS, name, value)
            for word in FLAGS.benchmark_method_flags or ():
                name, separator, text = word.partition("=")
                if not separator or name not in FLAGS:
                    raise UserError(
                        "config.syntax", "--benchmark_method_flags", f"{word!r} is no flag=value", "See --helpfull"
                    )
                setattr(FLAGS, name, FLAGS[name].parser.parse(text))
            yield


def define_method_flags() -> None:
    """Defines --benchmark_method_flags; once in a process, a second call does nothing."""
    if "benchmark_method_flags" not in FLAGS:
        meaning = "flag=value, which wins over what a benchmark method sets; any number of times."
        flags.DEFINE_multi_string("benchmark_method_flags", None, meaning)


def flags_as_text() -> str:
    """Every flag whose value is not its default, as on a command line."""
    flags_by_name = {FLAGS[name].name: FLAGS[name] for name in sorted(FLAGS)}  # short names lead to the same flag
    changed = (flag for flag in flags_by_name.values() if flag.value != flag.default)
    return " ".join(flag.serialize().replace("\n", " ") for flag in changed)


def limit_gpu_memory() -> None:
    """One logical device of `MEMORY_LIMIT` on each GPU there is; a process does it once."""
    for gpu in tf.config.list_physical_devices("GPU"):
        if not tf.config.get_logical_device_configuration(gpu):
            limit = tf.config.LogicalDeviceConfiguration(memory_limit=MEMORY_LIMIT)
            tf.config.set_logical_device_configuration(gpu, [limit])
