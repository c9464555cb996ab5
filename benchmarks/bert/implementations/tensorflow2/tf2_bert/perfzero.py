"""The interface that PerfZero (github.com/tensorflow/benchmarks) expects of a benchmark class.

PerfZero creates an instance with keyword arguments, sets TEST_REPORT_FILE_PREFIX, calls one method
without arguments in a separate process, and reads the `BenchmarkEntries` that `report_benchmark`
wrote at that prefix.
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
MEMORY_LIMIT = 14_700  # MB per GPU, as published: the usable memory of a 16 GB V100


class BenchmarkTimerCallback:
    """Time each loop of steps, numbered from 0."""

    def __init__(self) -> None:
        self._starts: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._steps: dict[int, int] = {}

    def on_batch_begin(self, batch: int, logs: object = None) -> None:
        """Record the start of loop ``batch``."""
        self._starts[batch] = time.time()

    def on_batch_end(self, batch: int, logs: Mapping[str, int] | None = None) -> None:
        """Record the end of loop ``batch``, of ``logs["steps"]`` steps;
        a missing start is that of the latest loop.
        """
        self._steps[batch] = (logs or {}).get("steps", 1)
        if self._starts:
            self._seconds[batch] = time.time() - self._starts.get(batch, max(self._starts.values()))

    def get_examples_per_sec(self, batch_size: int, num_batches_to_skip: int = 1) -> float:
        """Return the examples per second of the counted loops, or 0.0 if there are none.

        ``batch_size`` is the examples in the longest loop; shorter loops count in proportion.
        """
        counted = {
            batch: spent for batch, spent in self._seconds.items() if batch >= num_batches_to_skip
        }
        loops = sum(self._steps[batch] for batch in counted) / max(self.get_longest_loop(), 1)
        return batch_size * loops / sum(counted.values()) if counted else 0.0

    def get_longest_loop(self) -> int:
        """Return the steps of the longest loop, fewer than --steps_per_loop if evaluations
        or the end cut it short.
        """
        return max(self._steps.values(), default=0)

    def get_startup_time(self, program_start_time: float) -> float:
        """Return the seconds from ``program_start_time`` (time.time()) to the first loop,
        or 0.0 before it.
        """
        return min(self._starts.values()) - program_start_time if self._starts else 0.0


class PerfZeroBenchmark(tf.test.Benchmark):
    """Base class for benchmarks whose methods each set their own flags."""

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
            output_dir: parent of each method's results folder; BENCHMARK_OUTPUT_DIR overrides it.
            default_flags: name -> value, for methods that do not set the flag.
            root_data_dir: data folder.
            flag_methods: functions that define the flags.
            tpu: name or address of a TPU; BENCHMARK_TPU overrides it.
            kwargs: arguments of other benchmark classes; ignored.
        """
        # Do not call TensorFlow's constructor: it changes the thread pools, unlike any other run.
        self.output_dir = environment().get("BENCHMARK_OUTPUT_DIR") or output_dir or "/tmp"
        self.tpu = environment().get("BENCHMARK_TPU") or tpu
        self.root_data_dir = root_data_dir or ""
        self.default_flags = dict(default_flags or {})
        self.flag_methods = tuple(flag_methods or ())

    def model_dir(self, name: str) -> str:
        """Return the results folder of method ``name``. Raises UserError for a bucket."""
        if "://" in self.output_dir:
            remedy = "Leave out --scratch_gcs_url; --output_gcs_url copies the results at the end"
            reason = f"{self.output_dir} is not a folder on this machine"
            raise UserError("config.unsupported", "output_dir", reason, remedy)
        return f"{self.output_dir}/{name}"

    @contextmanager
    def flags_set(self, values: Mapping[str, object]) -> Iterator[None]:
        """Set flags to ``values`` within the block, then restore them.

        ``values`` override `default_flags`; --benchmark_method_flags overrides both.
        """
        for define in (*self.flag_methods, define_method_flags):
            define()
        if not FLAGS.is_parsed():
            FLAGS(["perfzero"])  # the command line is PerfZero's
        with flagsaver.flagsaver():
            for name, value in {
                **self.default_flags,
                **({"tpu": self.tpu} if self.tpu else {}),
                **values,
            }.items():
                setattr(FLAGS, name, value)
            for word in FLAGS.benchmark_method_flags or ():
                name, separator, text = word.partition("=")
                if not separator or name not in FLAGS:
                    reason = f"{word!r} is not of the form flag=value"
                    raise UserError(
                        "config.syntax", "--benchmark_method_flags", reason, "See --helpfull"
                    )
                setattr(FLAGS, name, FLAGS[name].parser.parse(text))
            yield


def define_method_flags() -> None:
    """Define --benchmark_method_flags; further calls in the same process do nothing."""
    if "benchmark_method_flags" not in FLAGS:
        meaning = "flag=value, which overrides the benchmark method's value; may be repeated."
        flags.DEFINE_multi_string("benchmark_method_flags", None, meaning)


def flags_as_text() -> str:
    """Return all flags with non-default values, as on a command line."""
    # Short names map to the same flag.
    flags_by_name = {FLAGS[name].name: FLAGS[name] for name in sorted(FLAGS)}
    changed = (flag for flag in flags_by_name.values() if flag.value != flag.default)
    return " ".join(flag.serialize().replace("\n", " ") for flag in changed)


def limit_gpu_memory() -> None:
    """Limit each GPU to one logical device of `MEMORY_LIMIT`; further calls do nothing."""
    for gpu in tf.config.list_physical_devices("GPU"):
        if not tf.config.get_logical_device_configuration(gpu):
            limit = tf.config.LogicalDeviceConfiguration(memory_limit=MEMORY_LIMIT)
            tf.config.set_logical_device_configuration(gpu, [limit])
