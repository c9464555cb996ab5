"""Divide HDF5 shards into bins by length: `mlbert prepare bins-hdf5` by its published name."""

from mlbert.cli.published import main

if __name__ == "__main__":
    main("run_split_and_chop_hdf5_files.py")
