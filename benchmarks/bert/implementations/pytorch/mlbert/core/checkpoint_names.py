"""Names of BERT's parameters in the checkpoints of other programs. Pure text, no tensors.

Ours are those of Hugging Face's ``BertForPreTraining`` without the second copy of the tied decoder. A ``*_names``
function gives one other form as a bijection {our name: their name}; an ``own_*`` function reads a name back, in all
the spellings that occur, and returns our name or names (several where a tensor holds query, key and value in a row).

TensorFlow 1: variables of the benchmark's ``model.ckpt-28252``; ``kernel`` is the transpose of our ``weight``.
TensorFlow 2: object-based checkpoints of Google's model garden; three layouts, see `tf2_names`.
NVIDIA: ``{'model': state_dict}``, plain, segmented and with fused modules, see `nvidia_names`.
Composer: ours below ``model.``, with the decoder's bias in place of the predictions' bias.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
PREDICTION_BIAS = "cls.predictions.bias"
VOCABULARY = (WORD_EMBEDDINGS, PREDICTION_BIAS)
# For models without a decoder of their own; with one, its bias stands in for the predictions'.
TIED = {"cls.predictions.decoder.weight": WORD_EMBEDDINGS, "cls.predictions.decoder.bias": PREDICTION_BIAS}

VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
TF2_LAYOUTS = ("pretrainer", "items", "variables")
NVIDIA_FORMS = ("plain", "segmented", "fused", "transformer_engine")
# Path components of optimizer slots and counters in TensorFlow 1 checkpoints.
TF1_OPTIMIZER = {"adam_v", "adam_m", "global_step", "LAMB", "LAMB_1", "beta1_power", "beta2_power", "Adam", "Adam_1"}
TF2_BOOKKEEPING = ("_CHECKPOINTABLE_OBJECT_GRAPH", "save_counter", "global_step", "step", "optimizer", "_optimizer")

_EMBEDDINGS = ("word_embeddings", "position_embeddings", "token_type_embeddings")
_SEGMENTS = "bert.embeddings.token_type_embeddings"
_LAYER_PARTS = (
    *(f"attention.self.{part}" for part in ("query", "key", "value")),
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
_LAYER = re.compile(r"bert\.encoder\.layer\.(\d+)\.(.+)")
_QKV = ("query", "key", "value")


def parameter_names(num_layers: int) -> list[str]:
    """Our names, in the model's order of parts: 14 + 16 per layer (398 for BERT-large)."""
    names = [f"bert.embeddings.{name}.weight" for name in _EMBEDDINGS]
    parts = ["bert.embeddings.LayerNorm"]
    parts += [f"bert.encoder.layer.{layer}.{part}" for layer in range(num_layers) for part in _LAYER_PARTS]
    parts += ["bert.pooler.dense", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"]
    names += [f"{part}.{kind}" for part in parts for kind in ("weight", "bias")]
    return [*names, PREDICTION_BIAS, "cls.seq_relationship.weight", "cls.seq_relationship.bias"]


def is_transposed(foreign: str) -> bool:
    """Whether a TensorFlow variable holds the transpose of our weight: all kernels do."""
    return foreign.removesuffix(VALUE).rsplit("/", 1)[-1] in ("kernel", "_kernel")


def tf1_names(num_layers: int) -> dict[str, str]:
    """Our names to the variables of a TensorFlow 1 checkpoint. The slots of the optimizer are not among them."""
    return {name: _tf1(name) for name in parameter_names(num_layers)}


def _tf1(name: str) -> str:
    special = {
        PREDICTION_BIAS: "cls/predictions/output_bias",
        "cls.seq_relationship.weight": "cls/seq_relationship/output_weights",
        "cls.seq_relationship.bias": "cls/seq_relationship/output_bias",
    }
    if name in special:
        return special[name]
    path = re.sub(r"layer\.(\d+)", r"layer_\1", name).replace(".", "/")
    if name.endswith("_embeddings.weight"):
        return path.removesuffix("/weight")
    return _with_kinds(path, is_norm="LayerNorm" in name)


def _with_kinds(path: str, is_norm: bool) -> str:
    stem, kind = path.rsplit("/", 1)
    kinds = {"weight": "gamma", "bias": "beta"} if is_norm else {"weight": "kernel", "bias": "bias"}
    return f"{stem}/{kinds[kind]}"


def tf2_names(num_layers: int, layout: str) -> dict[str, str]:
    """Our names to the keys of a TensorFlow 2 checkpoint.

    Layouts: "pretrainer", the whole pre-training model as Keras numbers its layers (``model/layer_with_weights-0`` is
    the encoder, 1 the masked-LM head, 2 the classifier); "items", encoder and heads by name; "variables", the names
    that the TensorFlow 1 to 2 conversion gives to the variables.
    """
    return {name: _tf2(name, num_layers, layout) + VALUE for name in parameter_names(num_layers)}


def _tf2(name: str, num_layers: int, layout: str) -> str:
    if layout == "variables":
        return _tf2_variable(name)
    heads = {
        "pretrainer": {
            "cls.predictions.transform.dense": "model/layer_with_weights-1/layer_with_weights-0",
            "cls.predictions.transform.LayerNorm": "model/layer_with_weights-1/layer_with_weights-1",
            "cls.predictions": "model/layer_with_weights-1/layer_with_weights-2",
            "cls.seq_relationship": "model/layer_with_weights-2/layer_with_weights-0",
        },
        "items": {
            "cls.predictions.transform.dense": "masked_lm/dense",
            "cls.predictions.transform.LayerNorm": "masked_lm/layer_norm",
            "cls.predictions": "masked_lm/output_bias.S",
            "bert.pooler.dense": "next_sentence..pooler_dense",
            "cls.seq_relationship": "model/classification_heads/0/out_proj",
        },
    }[layout]
    stem, kind = name.rsplit(".", 1)
    if stem in heads:
        joined = f"{heads[stem]}/{kind}".replace(".S/", ".S")
        return joined if name == PREDICTION_BIAS else _with_kinds(joined, is_norm="LayerNorm" in name)
    encoder = "model/layer_with_weights-0" if layout == "pretrainer" else "encoder"
    return f"{encoder}/{_tf2_encoder(name, num_layers)}"


def _tf2_encoder(name: str, num_layers: int) -> str:
    """Keras numbers the encoder's layers: three embeddings, their LayerNorm, the transformer layers, the pooler."""
    if name.endswith("_embeddings.weight"):
        number = _EMBEDDINGS.index(name.split(".")[2])
        return f"layer_with_weights-{number}/embeddings"
    match = _LAYER.fullmatch(name)
    if match:
        part, kind = match[2].rsplit(".", 1)
        stem = f"layer_with_weights-{int(match[1]) + 4}/{_TF2_LAYER_PARTS[part]}"
    else:
        stem, kind = name.rsplit(".", 1)
        stem = f"layer_with_weights-{3 if 'LayerNorm' in name else num_layers + 4}"
    return _with_kinds(f"{stem}/{kind}", is_norm="LayerNorm" in name)


_TF2_LAYER_PARTS = {
    **{f"attention.self.{part}": f"_attention_layer/_{part}_dense" for part in _QKV},
    "attention.output.dense": "_attention_layer/_output_dense",
    "attention.output.LayerNorm": "_attention_layer_norm",
    "intermediate.dense": "_intermediate_dense",
    "output.dense": "_output_dense",
    "output.LayerNorm": "_output_layer_norm",
}
_TF2_VARIABLE_PARTS = (
    ("bert/embeddings/word_embeddings", "word_embeddings/embeddings"),
    ("bert/embeddings/token_type_embeddings", "type_embeddings/embeddings"),
    ("bert/embeddings/position_embeddings", "position_embedding/embeddings"),
    ("bert/embeddings/LayerNorm", "embeddings/layer_norm"),
    ("bert/encoder/layer_", "transformer/layer_"),
    ("attention/self/", "self_attention/"),
    ("attention/output/dense/", "self_attention/attention_output/"),
    ("attention/output/LayerNorm/", "self_attention_layer_norm/"),
    ("intermediate/dense/", "intermediate/"),
    ("/output/dense/", "/output/"),
    ("/output/LayerNorm/", "/output_layer_norm/"),
    ("bert/pooler/dense/", "pooler_transform/"),
    ("cls/predictions/output_bias", "cls/predictions/output_bias/bias"),
    ("cls/seq_relationship/output_bias", "predictions/transform/logits/bias"),
    ("cls/seq_relationship/output_weights", "predictions/transform/logits/kernel"),
)


def _tf2_variable(name: str) -> str:
    path = _tf1(name)
    for old, new in _TF2_VARIABLE_PARTS:
        path = path.replace(old, new)
    return f"bert/{path}" if path.startswith("cls/") else path


@cache
def _tf2_table(num_layers: int) -> dict[str, str]:
    """Every known key without its value suffix to our name, wrappers taken off."""
    table: dict[str, str] = {}
    for layout in TF2_LAYOUTS:
        table |= {key.removesuffix(VALUE): name for name, key in tf2_names(num_layers, layout).items()}
    table |= {_tf2_encoder(name, num_layers): name for name in parameter_names(num_layers) if name.startswith("bert.")}
    for wrapped in [key for key in table if key.startswith(("encoder/", "model/"))]:
        table.setdefault(wrapped.split("/", 1)[1], table[wrapped])
    by_name = {"dense": "cls.predictions.transform.dense", "layer_norm": "cls.predictions.transform.LayerNorm"}
    for head in ("masked_lm", "layer_with_weights-1"):
        for part, stem in by_name.items():
            is_norm = part == "layer_norm"
            for kind in ("weight", "bias"):
                table[_with_kinds(f"{head}/{part}/{kind}", is_norm)] = f"{stem}.{kind}"
        table |= {f"{head}/{bias}": PREDICTION_BIAS for bias in ("bias", "output_bias.Sbias", "output_bias/bias")}
        table[f"{head}/embedding_table"] = WORD_EMBEDDINGS
    for kind, own in (("kernel", "weight"), ("bias", "bias")):
        table[f"classification_heads/0/dense/{kind}"] = f"bert.pooler.dense.{own}"
    return table


def own_tf2_name(key: str, num_layers: int) -> str | None:
    """Our name of a TensorFlow 2 key in any layout and with or without ``model/``, ``encoder/``; None if unknown."""
    table = _tf2_table(num_layers)
    path = key.removesuffix(VALUE).replace("/_kernel", "/kernel")
    path = path.replace("_attention_output_dense/", "_attention_layer/_output_dense/")
    path = re.sub(r"layer_with_weights-1/_?position_embeddings$", "layer_with_weights-1/embeddings", path)
    while path not in table:
        wrapper, slash, path = path.partition("/")
        if not slash or wrapper not in ("model", "encoder", "encoder_network", "network", "bert"):
            return None
    return table[path]


def is_tf1_optimizer(name: str) -> bool:
    """Whether a TensorFlow 1 variable is a slot or a counter of the optimizer."""
    return not TF1_OPTIMIZER.isdisjoint(name.split("/"))


def is_tf2_bookkeeping(key: str) -> bool:
    """Whether a TensorFlow 2 key belongs to the optimizer, a counter or the saver."""
    return ".OPTIMIZER_SLOT" in key or key.split("/", 1)[0] in TF2_BOOKKEEPING


def nvidia_names(num_layers: int, form: str = "plain") -> dict[str, str]:
    """Our names to those of NVIDIA's PyTorch BERT.

    Forms: "plain", as the checkpoint is stored; "segmented", as the running program holds it; "fused", segmented
    with both feed-forward matrices in one module; "transformer_engine", segmented with the modules of that library
    (there query, key and value are one tensor: these three keep their names here, `own_torch_names` reads the fused).
    """
    change: Callable[[str], str] = {
        "plain": lambda name: name,
        "segmented": _segmented,
        "fused": lambda name: _segmented(_fused(name)),
        "transformer_engine": lambda name: _segmented(_transformer_engine(name)),
    }[form]
    return {name: change(name) for name in parameter_names(num_layers)}


def _segmented(name: str) -> str:
    return f"{'bert_model_segment' if name.startswith('bert.') else 'heads_only_segment'}.{name}"


def _fused(name: str) -> str:
    name = re.sub(r"(layer\.\d+)\.intermediate\.dense\.(weight|bias)$", r"\1.intermediate.dense.\g<2>1", name)
    name = re.sub(r"(layer\.\d+)\.output\.dense\.(weight|bias)$", r"\1.intermediate.dense.\g<2>2", name)
    return "cls.predictions.decoder.bias" if name == PREDICTION_BIAS else name


def _transformer_engine(name: str) -> str:
    for own, theirs in (
        ("attention.output.dense.", "attention.proj_"),
        ("attention.output.LayerNorm.", "layernorm_mlp.layer_norm_"),
        ("intermediate.dense.", "layernorm_mlp.fc1_"),
        ("output.LayerNorm.", "output_LayerNorm."),
        ("output.dense.", "layernorm_mlp.fc2_"),
    ):
        name = re.sub(rf"(layer\.\d+)\.{re.escape(own)}", rf"\1.{theirs}", name)
    return name


_TORCH_SPELLINGS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(?:module\.)?(?:bert_model_segment|heads_only_segment)\.", ""),
        (r"^module\.", ""),
        (r"^model\.(?=bert\.|cls\.)", ""),
        (r"\.dense_act\.", ".dense."),
        (r"LayerNorm\.gamma$", "LayerNorm.weight"),
        (r"LayerNorm\.beta$", "LayerNorm.bias"),
        (r"(layer\.\d+)\.intermediate\.dense\.(weight|bias)1$", r"\1.intermediate.dense.\2"),
        (r"(layer\.\d+)\.intermediate\.dense\.(weight|bias)2$", r"\1.output.dense.\2"),
        (r"(layer\.\d+)\.attention\.proj_(weight|bias)$", r"\1.attention.output.dense.\2"),
        (r"(layer\.\d+)\.layernorm_mlp\.layer_norm_(weight|bias)$", r"\1.attention.output.LayerNorm.\2"),
        (r"(layer\.\d+)\.layernorm_mlp\.fc1_(weight|bias)$", r"\1.intermediate.dense.\2"),
        (r"(layer\.\d+)\.layernorm_mlp\.fc2_(weight|bias)$", r"\1.output.dense.\2"),
        (r"(layer\.\d+)\.output_LayerNorm\.", r"\1.output.LayerNorm."),
        (r"(layer\.\d+)\.attention\.qkv_(weight|bias)$", r"\1.attention.self.QKV.\2"),
        (r"(layer\.\d+)\.attention\.self\.Wqkv(?:\.weight)?$", r"\1.attention.self.QKV.weight"),
        (r"(layer\.\d+)\.attention\.self\.(?:Wqkv\.bias|Bqkv)$", r"\1.attention.self.QKV.bias"),
    )
)


def own_torch_names(name: str) -> tuple[str, ...]:
    """Our spelling of a name of Hugging Face, NVIDIA or Composer; it need not be a parameter that exists.

    Query, key and value in one tensor give three names: their rows follow each other in this order. The tied decoder
    keeps its name, a key of `TIED`.
    """
    for pattern, replacement in _TORCH_SPELLINGS:
        name = pattern.sub(replacement, name)
    if ".attention.self.QKV." in name:
        return tuple(name.replace("QKV", part) for part in _QKV)
    return (name,)


def composer_names(num_layers: int) -> dict[str, str]:
    """Our names to those of a Composer model: the encoder and the masked-LM head, which is all that it holds."""
    names = {name: f"model.{name}" for name in parameter_names(num_layers)}
    return {name: key for name, key in names.items() if ".pooler." not in name and "seq_relationship" not in name}


def mosaic_names(num_layers: int, head: str = "mlm") -> dict[str, str]:
    """Our names of a gated BERT with ALiBi to those of a MosaicBERT, without Composer's ``model.`` before them.

    Query, key and value, in this order, are one tensor there, named thrice here. ``head``: "mlm", or "classifier" with
    the pooler.
    """
    names = {f"{part}.weight": f"{part}.weight" for part in (WORD_EMBEDDINGS.removesuffix(".weight"), _SEGMENTS)}
    pairs = [("bert.embeddings.LayerNorm", "bert.embeddings.LayerNorm")]
    for layer in range(num_layers):
        stem = f"bert.encoder.layer.{layer}"
        pairs += [(f"{stem}.attention.self.{part}", f"{stem}.attention.self.Wqkv") for part in _QKV]
        pairs += [(f"{stem}.attention.output.{part}",) * 2 for part in ("dense", "LayerNorm")]
        pairs += [(f"{stem}.output.dense", f"{stem}.mlp.wo"), (f"{stem}.output.LayerNorm", f"{stem}.mlp.layernorm")]
        names[f"{stem}.intermediate.dense.weight"] = f"{stem}.mlp.gated_layers.weight"
    heads = ("bert.pooler.dense", "classifier")
    if head == "mlm":
        heads = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm")
        names[PREDICTION_BIAS] = "cls.predictions.decoder.bias"
    pairs += [(part, part) for part in heads]
    return names | {f"{own}.{kind}": f"{theirs}.{kind}" for own, theirs in pairs for kind in ("weight", "bias")}
