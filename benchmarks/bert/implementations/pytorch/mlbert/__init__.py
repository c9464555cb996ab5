"""BERT pre-training as an MLPerf-style benchmark; see ``benchmarks/bert/README.md``."""
