"""Convert text to MDS sets for streaming."""

from mosaic_yaml.commands.convert_dataset import main

if __name__ == "__main__":
    main()
