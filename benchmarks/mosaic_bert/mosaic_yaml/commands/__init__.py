"""The command lines of MosaicML's BERT examples: ``main.py YAML [name=value ...]`` and others."""
