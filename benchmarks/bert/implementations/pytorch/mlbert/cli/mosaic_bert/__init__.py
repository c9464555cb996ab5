"""The programs of MosaicML's BERT examples, by their command lines: ``main.py YAML [name=value ...]`` and others."""
