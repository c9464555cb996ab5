"""What can be said of BIN_COUNTS before there is data; the rest is `mlbert.store.bins.check_counts`."""

from __future__ import annotations

from mlbert.core.errors import UserError
from mlbert.core.settings import TrainConfig


def validate_bin_counts(config: TrainConfig) -> None:
    """Compare BIN_COUNTS with the other settings. Raises UserError: they contradict each other."""
    try:
        counts = config.counts_of_bins
    except ValueError:
        reason = f"{config.bin_counts!r} are not whole numbers above 0"
        raise UserError("BIN_COUNTS", reason, 'Give for example "6 3 2 5"') from None
    if counts is None:
        return
    if sum(counts) != config.train_batch_size:
        reason = f"{config.bin_counts!r} sums to {sum(counts)}, BATCHSIZE is {config.train_batch_size}"
        raise UserError("BIN_COUNTS", reason, "Let them sum to BATCHSIZE, which counts all accumulation steps together")
    if config.max_sequences_per_pack > 1:
        reason = f"is set while MAX_SEQUENCES_PER_PACK is {config.max_sequences_per_pack}: packs come from no bin"
        raise UserError("BIN_COUNTS", reason, "Set MAX_SEQUENCES_PER_PACK=1, or unset BIN_COUNTS")
    if config.synthetic_data:
        raise UserError("BIN_COUNTS", "is set while SYNTH_DATA is: random tokens have no bins", "Unset one of them")
