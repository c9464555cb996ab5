"""The rules of a round of MLPerf Training, as far as they changed from round to round.

Sources: the ``closed_bert.yaml`` and ``closed_common.yaml`` of each ruleset in mlperf-logging, and
mlcommons/training_policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from mlaudit.rules import TARGET_MLM_ACCURACY

_FIRST_TARGET = 0.712
_FIRST_TARGET_OF_LARGE_BATCHES = 0.706
_LARGE_BATCH = 8192  # sequences per step, in ruleset 0.7.0


@dataclass(frozen=True, order=True)
class Round:
    """A round of MLPerf Training.

    Attributes:
        version: major and minor number.
        published: the day on which its results were published, the last one for its logs.
    """

    version: tuple[int, int]
    published: date

    @property
    def name(self) -> str:
        """Return the name of the round, such as v2.1."""
        return "v{}.{}".format(*self.version)

    @property
    def ruleset(self) -> str:
        """Return the name of its ruleset in the official tools."""
        return "{}.{}.0".format(*self.version)

    def target(self, global_batch_size: object = None) -> float:
        """Return the masked-token accuracy at which a run of the closed division ends."""
        if self.version >= (1, 0):
            return TARGET_MLM_ACCURACY
        is_large = isinstance(global_batch_size, int | float) and global_batch_size >= _LARGE_BATCH
        return _FIRST_TARGET_OF_LARGE_BATCHES if is_large else _FIRST_TARGET

    @property
    def has_grid(self) -> bool:
        """Return True if evaluations come at intervals by batch size; v0.7 had them from 3,000,000
        samples on, every 500,000.
        """
        return self.version >= (1, 0)

    @property
    def has_reference_points(self) -> bool:
        """Return True if convergence is compared with the reference's."""
        return self.version >= (1, 0)

    @property
    def checks_descriptions(self) -> bool:
        """Return True if the official tools check system descriptions."""
        return self.version >= (1, 0)

    @property
    def counts_samples(self) -> bool:
        """Return True if `epoch_num` has to be a number of samples: published logs have epochs or
        evaluations there up to v1.1.
        """
        return self.version >= (2, 0)

    @property
    def names_tensors(self) -> bool:
        """Return True if logs that name the tensors of the model name those of the ruleset's list,
        which was made after v1.1.
        """
        return self.version >= (2, 0)

    @property
    def needs_seeds(self) -> bool:
        """Return True if a log without its seed is at fault."""
        return self.version >= (4, 1)

    @property
    def has_earlier_statuses(self) -> bool:
        """Return True if descriptions may have the status words of logs, such as onprem."""
        return self.version <= (4, 0)
