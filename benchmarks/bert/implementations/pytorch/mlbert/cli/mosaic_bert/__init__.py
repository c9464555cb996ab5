"""The programs of benchmarks/mosaic_bert, by the names and flags under which they were published."""
