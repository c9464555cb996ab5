"""Text to the MDS sets that training streams."""

from mlbert.cli.mosaic_bert.convert_dataset import main

if __name__ == "__main__":
    main()
