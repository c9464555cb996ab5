"""Sources of `Batch`: shard store, packed and synthetic sources, evaluation set."""
