"""Run as a program: write checkpoints of the same BERT with TensorFlow.

    python tensorflow_program.py FOLDER

FOLDER has weights.npz (TensorFlow 1 names) and bert_config.json. The keys of TensorFlow 2 are those
of tests/assets/checkpoints/names.txt.
"""

import json
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from mlbert.models.weights.checkpoint_names import tf1_names

v1 = tf.compat.v1
NAMES = Path(__file__).parents[4] / "assets/checkpoints/names.txt"


def write_tf1(folder, weights):
    with tf.Graph().as_default():
        w = {
            name: v1.get_variable(name, initializer=tf.constant(array))
            for name, array in weights.items()
        }
        for name, array in weights.items():
            for slot in ("LAMB", "LAMB_1"):
                v1.get_variable(f"{name}/{slot}", initializer=tf.constant(array * 0 + 0.5))
        v1.train.create_global_step()
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            v1.train.Saver().save(session, str(folder / "tf1" / "model.ckpt"), global_step=28252)
            kept = {
                name: w[name] for name in w if name != "bert/encoder/layer_1/output/dense/kernel"
            }
            for name, stored in (
                ("incomplete", kept),
                ("foreign", {"weight": w["bert/pooler/dense/bias"]}),
            ):
                v1.train.Saver(stored).save(session, str(folder / name / "model.ckpt"))


def tf2_array(name, array, heads):
    """Return the array as Keras has it: attention by heads,
    and the classifier's weights as a kernel.
    """
    if name == "cls/seq_relationship/output_weights":
        return array.T
    if "/attention/self/" in name:
        return array.reshape(*array.shape[:-1], heads, -1)
    return (
        array.reshape(heads, -1, array.shape[1])
        if name.endswith("/attention/output/dense/kernel")
        else array
    )


def save(folder, variables):
    """Save the variables by their keys, as a model's or encoder's nested objects."""

    def tracked(tree):
        is_leaf = not isinstance(tree, dict)
        return (
            tree
            if is_leaf
            else tf.train.Checkpoint(**{name: tracked(part) for name, part in tree.items()})
        )

    tree = {}
    for key, variable in variables.items():
        # Dots and slashes.
        *path, last = (part.replace(".S", "/").replace("..", ".") for part in key.split("/"))
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = variable
    objects = {name: tracked(part) for name, part in tree.items()}
    if folder.name == "pretrainer":
        objects["optimizer"] = optimizer = v1.train.AdamOptimizer()
        optimizer.apply_gradients(
            [(tf.zeros_like(variable), variable) for variable in variables.values()]
        )
    tf.train.Checkpoint(**objects).write(str(folder / "bert_model.ckpt"))


def write_tf2(folder, weights, config):
    own_names = tf1_names(config["num_hidden_layers"])
    heads = config["num_attention_heads"]
    variables = {
        own: tf.Variable(tf2_array(name, weights[name], heads)) for own, name in own_names.items()
    }
    layouts = {"pretrainer": {}, "items": {}, "encoder_only": {}}
    for program, layout, key, own in map(str.split, NAMES.read_text().splitlines()):
        if program == "tf2" and layout in layouts:
            layouts[layout][key.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE")] = variables[own]
    encoder = "model/layer_with_weights-0/"
    for key, variable in layouts["pretrainer"].items():
        if key.startswith(encoder):  # with the attention's output where older programs have it
            older = key.replace("_attention_layer/_output_dense", "_attention_output_dense")
            layouts["encoder_only"][older.replace(encoder, "model/")] = variable
    untrained = f"encoder/layer_with_weights-{config['num_hidden_layers'] + 4}"
    layouts["items"] |= {
        f"{untrained}/kernel": tf.Variable(weights["bert/pooler/dense/kernel"] * 0 + 1),
        f"{untrained}/bias": variables["bert.pooler.dense.bias"],
        "masked_lm/embedding_table": variables["bert.embeddings.word_embeddings.weight"],
    }
    for layout, keys in layouts.items():
        save(folder / layout, keys)


def main(folder):
    weights = dict(np.load(folder / "weights.npz"))
    config = json.loads((folder / "bert_config.json").read_text())
    for name in ("tf1", "incomplete", "foreign", "pretrainer", "items", "encoder_only"):
        (folder / name).mkdir()
        (folder / name / "bert_config.json").write_text(json.dumps(config))
    write_tf1(folder, weights)
    write_tf2(folder, weights, config)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
