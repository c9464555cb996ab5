"""Run one training process with the settings of the sourced config and the flags."""

from mlbert.cli.train import main

if __name__ == "__main__":
    main()
