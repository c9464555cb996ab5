"""Run as a program: write checkpoints with TensorFlow and the outputs of a plain TensorFlow graph of the same BERT.

    python tensorflow_program.py FOLDER

FOLDER has weights.npz (TensorFlow 1 names), inputs.npz (padded int64 [S, L] input_ids, token_type_ids,
attention_mask, and labels, -100 at tokens that are not masked) and bert_config.json.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
SLOTS = ("LAMB", "LAMB_1")


def layer_norm(x, scope, w):
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) / tf.sqrt(variance + 1e-12) * w[f"{scope}/gamma"] + w[f"{scope}/beta"]


def dense(x, scope, w):
    return tf.matmul(x, w[f"{scope}/kernel"]) + w[f"{scope}/bias"]


def gelu(x):
    return 0.5 * x * (1 + tf.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attention(x, mask, heads, scope, w):
    def split(kind):
        y = dense(x, f"{scope}/self/{kind}", w)
        return tf.transpose(tf.reshape(y, [-1, tf.shape(y)[1], heads, y.shape[-1] // heads]), [0, 2, 1, 3])

    query, key, value = (split(kind) for kind in ("query", "key", "value"))
    scores = tf.matmul(query, key, transpose_b=True) / math.sqrt(query.shape[-1])
    scores += (1.0 - tf.cast(mask, tf.float32)[:, None, None, :]) * -10000.0
    context = tf.transpose(tf.matmul(tf.nn.softmax(scores), value), [0, 2, 1, 3])
    context = tf.reshape(context, tf.shape(x))
    context.set_shape(x.shape)
    return layer_norm(x + dense(context, f"{scope}/output/dense", w), f"{scope}/output/LayerNorm", w)


def bert(inputs, config, w):
    """Masked-LM logits [M, V] and next-sentence logits [S, 2]."""
    ids, kinds = inputs["input_ids"], inputs["token_type_ids"]
    x = tf.gather(w["bert/embeddings/word_embeddings"], ids)
    x += tf.gather(w["bert/embeddings/token_type_embeddings"], kinds)
    x += w["bert/embeddings/position_embeddings"][: ids.shape[1]]
    x = layer_norm(x, "bert/embeddings/LayerNorm", w)
    for i in range(config["num_hidden_layers"]):
        scope = f"bert/encoder/layer_{i}"
        x = attention(x, inputs["attention_mask"], config["num_attention_heads"], f"{scope}/attention", w)
        inner = gelu(dense(x, f"{scope}/intermediate/dense", w))
        x = layer_norm(x + dense(inner, f"{scope}/output/dense", w), f"{scope}/output/LayerNorm", w)
    masked = tf.boolean_mask(x, inputs["labels"] != -100)
    head = gelu(dense(masked, "cls/predictions/transform/dense", w))
    head = layer_norm(head, "cls/predictions/transform/LayerNorm", w)
    logits = tf.matmul(head, w["bert/embeddings/word_embeddings"], transpose_b=True) + w["cls/predictions/output_bias"]
    pooled = tf.tanh(dense(x[:, 0], "bert/pooler/dense", w))
    sentence = tf.matmul(pooled, w["cls/seq_relationship/output_weights"], transpose_b=True)
    return logits, sentence + w["cls/seq_relationship/output_bias"]


def write_tf1(folder, weights, inputs, config):
    with tf.Graph().as_default():
        w = {name: v1.get_variable(name, initializer=tf.constant(array)) for name, array in weights.items()}
        for name, array in weights.items():
            for slot in SLOTS:
                v1.get_variable(f"{name}/{slot}", initializer=tf.constant(array * 0 + 0.5))
        v1.train.create_global_step()
        logits = bert(inputs, config, w)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            masked, sentence = session.run(logits)
            v1.train.Saver().save(session, str(folder / "tf1" / "model.ckpt"), global_step=28252)
            kept = {name: w[name] for name in w if name != "bert/encoder/layer_1/output/dense/kernel"}
            for name, stored in (("incomplete", kept), ("foreign", {"weight": w["bert/pooler/dense/bias"]})):
                v1.train.Saver(stored).save(session, str(folder / name / "model.ckpt"))
    np.savez(folder / "outputs.npz", masked=masked, sentence=sentence)


def tracked(tree):
    """Nested dictionaries as nested objects that a checkpoint saves by these names."""
    if isinstance(tree, dict):
        return tf.train.Checkpoint(**{name: tracked(part) for name, part in tree.items()})
    return tree


def tf2_encoder(v, config, old_attention_output=False):
    """Keras' numbering of the encoder: embeddings, their LayerNorm, the layers, the pooler. ``v`` makes variables."""
    heads, width = config["num_attention_heads"], config["hidden_size"]
    size = width // heads
    tree = {
        "layer_with_weights-0": {"embeddings": v("bert/embeddings/word_embeddings")},
        "layer_with_weights-1": {"embeddings": v("bert/embeddings/position_embeddings")},
        "layer_with_weights-2": {"embeddings": v("bert/embeddings/token_type_embeddings")},
        "layer_with_weights-3": tf2_norm(v, "bert/embeddings/LayerNorm"),
    }
    for i in range(config["num_hidden_layers"]):
        scope = f"bert/encoder/layer_{i}"
        of_attention = {
            f"_{kind}_dense": {
                "kernel": v(f"{scope}/attention/self/{kind}/kernel", (width, heads, size)),
                "bias": v(f"{scope}/attention/self/{kind}/bias", (heads, size)),
            }
            for kind in ("query", "key", "value")
        }
        output = {
            "kernel": v(f"{scope}/attention/output/dense/kernel", (heads, size, width)),
            "bias": v(f"{scope}/attention/output/dense/bias"),
        }
        layer = {
            "_attention_layer": of_attention if old_attention_output else {**of_attention, "_output_dense": output},
            "_attention_layer_norm": tf2_norm(v, f"{scope}/attention/output/LayerNorm"),
            "_intermediate_dense": tf2_dense(v, f"{scope}/intermediate/dense"),
            "_output_dense": tf2_dense(v, f"{scope}/output/dense"),
            "_output_layer_norm": tf2_norm(v, f"{scope}/output/LayerNorm"),
        }
        if old_attention_output:
            layer["_attention_output_dense"] = output
        tree[f"layer_with_weights-{i + 4}"] = layer
    tree[f"layer_with_weights-{config['num_hidden_layers'] + 4}"] = tf2_dense(v, "bert/pooler/dense")
    return tree


def tf2_dense(v, scope):
    return {"kernel": v(f"{scope}/kernel"), "bias": v(f"{scope}/bias")}


def tf2_norm(v, scope):
    return {"gamma": v(f"{scope}/gamma"), "beta": v(f"{scope}/beta")}


def write_tf2(folder, weights, config):
    made = []

    def v(name, shape=None):
        array = weights[name]
        if name == "cls/seq_relationship/output_weights":
            array = array.T
        made.append(tf.Variable(array if shape is None else array.reshape(shape)))
        return made[-1]

    def classifier():
        return {"kernel": v("cls/seq_relationship/output_weights"), "bias": v("cls/seq_relationship/output_bias")}

    pretrainer = {
        "layer_with_weights-0": tf2_encoder(v, config),
        "layer_with_weights-1": {
            "layer_with_weights-0": tf2_dense(v, "cls/predictions/transform/dense"),
            "layer_with_weights-1": tf2_norm(v, "cls/predictions/transform/LayerNorm"),
            "layer_with_weights-2": {"bias": v("cls/predictions/output_bias")},
        },
        "layer_with_weights-2": {"layer_with_weights-0": classifier()},
    }
    optimizer = v1.train.AdamOptimizer()
    optimizer.apply_gradients([(tf.zeros_like(variable), variable) for variable in made])
    save(folder / "pretrainer", model=tracked(pretrainer), optimizer=optimizer)

    encoder = tf2_encoder(v, config)
    untrained = f"layer_with_weights-{config['num_hidden_layers'] + 4}"
    encoder[untrained]["kernel"] = tf.Variable(weights["bert/pooler/dense/kernel"] * 0 + 1)
    items = {
        "encoder": encoder,
        "masked_lm": {
            "dense": tf2_dense(v, "cls/predictions/transform/dense"),
            "layer_norm": tf2_norm(v, "cls/predictions/transform/LayerNorm"),
            "output_bias/bias": v("cls/predictions/output_bias"),
            "embedding_table": encoder["layer_with_weights-0"]["embeddings"],
        },
        "next_sentence.pooler_dense": tf2_dense(v, "bert/pooler/dense"),
        "model": {"classification_heads": {"0": {"out_proj": classifier()}}},
    }
    save(folder / "items", **{name: tracked(part) for name, part in items.items()})
    save(folder / "encoder_only", model=tracked(tf2_encoder(v, config, old_attention_output=True)))


def save(folder, **objects):
    tf.train.Checkpoint(**objects).write(str(folder / "bert_model.ckpt"))


def main(folder):
    weights = dict(np.load(folder / "weights.npz"))
    inputs = dict(np.load(folder / "inputs.npz"))
    config = json.loads((folder / "bert_config.json").read_text())
    for name in ("tf1", "incomplete", "foreign", "pretrainer", "items", "encoder_only"):
        (folder / name).mkdir()
        (folder / name / "bert_config.json").write_text(json.dumps(config))
    write_tf1(folder, weights, inputs, config)
    write_tf2(folder, weights, config)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
