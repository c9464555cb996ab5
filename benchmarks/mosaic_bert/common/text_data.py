"""Print the batches that training gets from a set of texts."""

from mlbert.cli.mosaic_bert.text_data import main

if __name__ == "__main__":
    main()
