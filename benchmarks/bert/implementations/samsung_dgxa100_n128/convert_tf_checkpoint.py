"""`mlbert convert tf1-to-nvidia`, TensorFlow 1 to NVIDIA's .pt, by its published name."""

from mlbert.cli.published import main

if __name__ == "__main__":
    main("convert_tf_checkpoint.py")
