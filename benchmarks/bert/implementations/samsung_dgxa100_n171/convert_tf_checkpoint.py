"""Convert the TensorFlow 1 checkpoint to NVIDIA's .pt file:
`mlbert convert tf1-to-nvidia` by its published name.
"""

from mlbert.cli.published import main

if __name__ == "__main__":
    main("convert_tf_checkpoint.py")
