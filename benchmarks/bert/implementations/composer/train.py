"""One training process of this system; every setting comes from the sourced config and the flags."""

from mlbert.cli.train import main

if __name__ == "__main__":
    main()
