"""Read the YAML files of MosaicML's BERT programs, and run them with `mlbert`."""
