"""Convert text to MDS sets for streaming."""

from mlbert.cli.mosaic_bert.convert_dataset import main

if __name__ == "__main__":
    main()
