"""The TensorFlow 1 checkpoint as NVIDIA's .pt file: what `mlbert convert tf1-to-nvidia` does, by its published name."""

from mlbert.cli.published import main

if __name__ == "__main__":
    main("convert_tf_checkpoint.py")
