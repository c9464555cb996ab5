"""Map parameter names between our models and the checkpoints of other programs.

Our names are those of Hugging Face's ``BertForPreTraining`` without the second copy of the tied
decoder. ``own_*`` functions translate any known spelling to ours with a table of regular
expressions; ``*_names`` functions return {our name: their name}.

TensorFlow 1: variables of the benchmark's ``model.ckpt-28252``; ``kernel`` is the transpose of our
``weight``. TensorFlow 2: object-based checkpoints of Google's model garden, in three layouts: the
pre-training model with layers numbered by Keras (``model/layer_with_weights-0`` is the encoder, 1
the masked-LM head, 2 the classifier); encoder and heads by name (``encoder``, ``masked_lm``); and
the variable names of the TensorFlow 1 to 2 conversion. NVIDIA: ``{'model': state_dict}``, plain,
segmented, or with fused or Transformer Engine modules. Any of them may have the prefixes of
torch.compile and of data parallelism; an encoder without heads has no ``bert.``. Composer: our
names below ``model.``, plus a second copy of the decoder and its bias. MosaicBERT has query, key
and value in one tensor, ``mlp`` modules instead of ``intermediate`` and ``output``, and stores the
predictions' bias as the decoder's. ModernBERT has its own names, in transformers and in the
research repository's checkpoints. RoBERTa has a BERT's below ``roberta.``, and other heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable

WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
POSITION_EMBEDDINGS = "bert.embeddings.position_embeddings.weight"
PREDICTION_BIAS = "cls.predictions.bias"
VOCABULARY = (WORD_EMBEDDINGS, PREDICTION_BIAS)
# Aliases in models with a tied decoder. An untied decoder has its own bias,
# which replaces the predictions' bias.
TIED = {
    "cls.predictions.decoder.weight": WORD_EMBEDDINGS,
    "cls.predictions.decoder.bias": PREDICTION_BIAS,
}

_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"  # the end of every TensorFlow 2 key
_KERAS = "layer_with_weights-"  # Keras's name of a numbered layer
# Path components of optimizer slots and counters in TensorFlow 1 checkpoints.
_TF1_OPTIMIZER = {
    "adam_v",
    "adam_m",
    "global_step",
    "LAMB",
    "LAMB_1",
    "beta1_power",
    "beta2_power",
    "Adam",
    "Adam_1",
}
_TF2_BOOKKEEPING = (
    "_CHECKPOINTABLE_OBJECT_GRAPH",
    "save_counter",
    "global_step",
    "step",
    "optimizer",
    "_optimizer",
)

_QKV = ("query", "key", "value")
_LAYER_PARTS = (
    *(f"attention.self.{part}" for part in _QKV),
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)


def fused_position(own: str) -> int:
    """Return the position of a parameter's rows in a tensor that fuses query, key and value;
    0 for other tensors.
    """
    if ".self.key." in own:
        return 1
    if ".self.value." in own:
        return 2
    return 0


def parameter_names(num_layers: int) -> list[str]:
    """Return our names in the model's order: 14 + 16 per layer (398 for BERT-large)."""
    names = [
        f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")
    ]
    parts = ["bert.embeddings.LayerNorm"]
    parts += [
        f"bert.encoder.layer.{layer}.{part}" for layer in range(num_layers) for part in _LAYER_PARTS
    ]
    parts += [
        "bert.pooler.dense",
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
    ]
    names += [f"{part}.{kind}" for part in parts for kind in ("weight", "bias")]
    return [*names, PREDICTION_BIAS, "cls.seq_relationship.weight", "cls.seq_relationship.bias"]


def _table(*rows: tuple[str, str | Callable[[re.Match[str]], str]]) -> Callable[[str], str]:
    """Return a function that applies the rows (pattern, replacement) to a name, in order."""
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rows]

    def respell(name: str) -> str:
        for pattern, replacement in compiled:
            name = pattern.sub(replacement, name)
        return name

    return respell


_mosaic_name = _table(
    (r"\.attention\.self\.(?:query|key|value)\.", ".attention.self.Wqkv."),
    (r"(layer\.\d+)\.intermediate\.dense\.", r"\1.mlp.gated_layers."),
    (r"(layer\.\d+)\.output\.dense\.", r"\1.mlp.wo."),
    (r"(layer\.\d+)\.output\.LayerNorm\.", r"\1.mlp.layernorm."),
    (r"^cls\.predictions\.bias$", "cls.predictions.decoder.bias"),
)


def composer_name(own: str, mosaic_bert: bool) -> str:
    """Return Composer's name of one of our parameters.

    In a MosaicBERT, query, key and value share one name.
    """
    return f"model.{_mosaic_name(own) if mosaic_bert else own}"


_tf1_name = _table(
    (r"^cls\.(predictions|seq_relationship)\.bias$", r"cls.\1.output_bias"),
    (r"^cls\.seq_relationship\.weight$", "cls.seq_relationship.output_weights"),
    (r"_embeddings\.weight$", "_embeddings"),
    (r"LayerNorm\.weight$", "LayerNorm.gamma"),
    (r"LayerNorm\.bias$", "LayerNorm.beta"),
    (r"\.weight$", ".kernel"),
    (r"\.layer\.(\d+)\.", r".layer_\1."),
    (r"\.", "/"),
)


def tf1_names(num_layers: int) -> dict[str, str]:
    """Return {our name: TensorFlow 1 variable}, without optimizer slots."""
    return {name: _tf1_name(name) for name in parameter_names(num_layers)}


# Our spelling of a TensorFlow 2 key, in any layout. The result need not be an existing parameter.
own_tf2_name = _table(
    (rf"{re.escape(_VALUE)}$", ""),
    # Objects that contain the encoder, which Keras counts as the model's first layer.
    (r"^(?:(?:model|encoder|encoder_network|network|bert)/)+", ""),
    (rf"^{_KERAS}0/(?={_KERAS})", ""),
    (r"/(?:_?kernel|gamma|embeddings|_?position_embeddings)$", ".weight"),
    (r"/(?:bias|beta)$", ".bias"),
    # Heads.
    (rf"^(?:masked_lm|{_KERAS}1)/embedding_table$", WORD_EMBEDDINGS),
    (rf"^(?:masked_lm|{_KERAS}1)/(?:dense|{_KERAS}0)\.", "cls.predictions.transform.dense."),
    (
        rf"^(?:masked_lm|{_KERAS}1)/(?:layer_norm|{_KERAS}1)\.",
        "cls.predictions.transform.LayerNorm.",
    ),
    (rf"^(?:masked_lm|{_KERAS}1)(?:/{_KERAS}2|/output_bias)?\.(?:Sbias|bias)$", PREDICTION_BIAS),
    (r"^cls/predictions/output_bias\.", "cls.predictions."),
    (r"^cls/predictions/transform/(dense|LayerNorm)\.", r"cls.predictions.transform.\1."),
    (
        rf"^(?:{_KERAS}2/{_KERAS}0|classification_heads/0/out_proj|predictions/transform/logits)\.",
        "cls.seq_relationship.",
    ),
    (
        r"^(?:next_sentence\.\.pooler_dense|classification_heads/0/dense|pooler_transform)\.",
        "bert.pooler.dense.",
    ),
    # The encoder: Keras numbers three embeddings, their LayerNorm, the transformer layers,
    # the pooler.
    (rf"^(?:{_KERAS}0|word_embeddings)\.", "bert.embeddings.word_embeddings."),
    (rf"^(?:{_KERAS}1|position_embedding)\.", "bert.embeddings.position_embeddings."),
    (rf"^(?:{_KERAS}2|type_embeddings)\.", "bert.embeddings.token_type_embeddings."),
    (rf"^(?:{_KERAS}3|embeddings/layer_norm)\.", "bert.embeddings.LayerNorm."),
    (rf"^{_KERAS}\d+\.", "bert.pooler.dense."),
    (rf"^{_KERAS}(\d+)/", lambda match: f"bert.encoder.layer.{int(match[1]) - 4}."),
    (r"^transformer/layer_(\d+)/", r"bert.encoder.layer.\1."),
    (
        r"(layer\.\d+)\.(?:_attention_layer/|_attention)_output_dense\.",
        r"\1.attention.output.dense.",
    ),
    (r"(layer\.\d+)\._attention_layer/_(\w+)_dense\.", r"\1.attention.self.\2."),
    (r"(layer\.\d+)\.self_attention/attention_output\.", r"\1.attention.output.dense."),
    (r"(layer\.\d+)\.self_attention/", r"\1.attention.self."),
    (r"(layer\.\d+)\.(?:_|self_)attention_layer_norm\.", r"\1.attention.output.LayerNorm."),
    (r"(layer\.\d+)\.(?:_intermediate_dense|intermediate)\.", r"\1.intermediate.dense."),
    (r"(layer\.\d+)\.(?:_output_dense|output)\.(?=weight|bias)", r"\1.output.dense."),
    (r"(layer\.\d+)\._?output_layer_norm\.", r"\1.output.LayerNorm."),
)


def is_transposed(foreign: str) -> bool:
    """Return whether a TensorFlow variable is the transpose of our weight, as all kernels are."""
    return foreign.removesuffix(_VALUE).rsplit("/", 1)[-1] in ("kernel", "_kernel")


def is_tf1_optimizer(name: str) -> bool:
    """Return whether a TensorFlow 1 variable is an optimizer slot or counter."""
    return not _TF1_OPTIMIZER.isdisjoint(name.split("/"))


def is_tf2_bookkeeping(key: str) -> bool:
    """Return whether a TensorFlow 2 key belongs to the optimizer, a counter or the saver."""
    return ".OPTIMIZER_SLOT" in key or key.split("/", 1)[0] in _TF2_BOOKKEEPING


_torch_spelling = _table(
    # Wrappers: torch.compile, also of a part of the model, and data parallelism.
    (r"(^|\.)_orig_mod\.", r"\1"),
    (r"^(?:module\.)+", ""),
    (r"^(?:bert_model_segment|heads_only_segment)\.", ""),
    (r"^model\.(?=(?:bert|cls|classifier|head|decoder)\.)", ""),
    # ModernBERT.
    (r"^model\.(?=(?:embeddings|layers|final_norm)\.)", ""),
    # RoBERTa.
    (r"^roberta\.", "bert."),
    (r"^lm_head\.dense\.", "cls.predictions.transform.dense."),
    (r"^lm_head\.layer_norm\.", "cls.predictions.transform.LayerNorm."),
    (r"^lm_head\.", "cls.predictions."),
    (r"^classifier\.dense\.", "bert.pooler.dense."),
    (r"^classifier\.out_proj\.", "classifier."),
    # An encoder that was saved without heads.
    (r"^(?=(?:embeddings|encoder|pooler|layers|final_norm)\.)", "bert."),
    (r"\.dense_act\.", ".dense."),
    (r"LayerNorm\.gamma$", "LayerNorm.weight"),
    (r"LayerNorm\.beta$", "LayerNorm.bias"),
    # Both feed-forward matrices in one module.
    (r"(layer\.\d+)\.intermediate\.dense\.(weight|bias)1$", r"\1.intermediate.dense.\2"),
    (r"(layer\.\d+)\.intermediate\.dense\.(weight|bias)2$", r"\1.output.dense.\2"),
    # Transformer Engine.
    (r"(layer\.\d+)\.attention\.proj_(weight|bias)$", r"\1.attention.output.dense.\2"),
    (
        r"(layer\.\d+)\.layernorm_mlp\.layer_norm_(weight|bias)$",
        r"\1.attention.output.LayerNorm.\2",
    ),
    (r"(layer\.\d+)\.layernorm_mlp\.fc1_(weight|bias)$", r"\1.intermediate.dense.\2"),
    (r"(layer\.\d+)\.layernorm_mlp\.fc2_(weight|bias)$", r"\1.output.dense.\2"),
    (r"(layer\.\d+)\.output_LayerNorm\.", r"\1.output.LayerNorm."),
    (r"(layer\.\d+)\.attention\.qkv_(weight|bias)$", r"\1.attention.self.QKV.\2"),
    (r"(layer\.\d+)\.attention\.self\.Wqkv(?:\.weight)?$", r"\1.attention.self.QKV.weight"),
    (r"(layer\.\d+)\.attention\.self\.(?:Wqkv\.bias|Bqkv)$", r"\1.attention.self.QKV.bias"),
    # MosaicBERT.
    (r"(layer\.\d+)\.mlp\.gated_layers\.", r"\1.intermediate.dense."),
    (r"(layer\.\d+)\.mlp\.wo\.", r"\1.output.dense."),
    (r"(layer\.\d+)\.mlp\.layernorm\.", r"\1.output.LayerNorm."),
    # ModernBERT; in the research repository, layers are below an encoder.
    (r"^bert\.embeddings\.tok_embeddings\.", "bert.embeddings.word_embeddings."),
    (r"^bert\.embeddings\.norm\.", "bert.embeddings.LayerNorm."),
    (r"^bert\.(?:encoder\.)?layers\.(\d+)\.", r"bert.encoder.layer.\1."),
    (r"(layer\.\d+)\.attn_norm\.", r"\1.attention.LayerNorm."),
    (r"(layer\.\d+)\.attn\.Wqkv\.", r"\1.attention.self.QKV."),
    (r"(layer\.\d+)\.attn\.Wo\.", r"\1.attention.output.dense."),
    (r"(layer\.\d+)\.mlp_norm\.", r"\1.intermediate.LayerNorm."),
    (r"(layer\.\d+)\.mlp\.Wi\.", r"\1.intermediate.dense."),
    (r"(layer\.\d+)\.mlp\.Wo\.", r"\1.output.dense."),
    (r"^bert\.final_norm\.", "bert.encoder.LayerNorm."),
    (r"^head\.dense\.", "cls.predictions.transform.dense."),
    (r"^head\.norm\.", "cls.predictions.transform.LayerNorm."),
    (r"^decoder\.(?=weight|bias)", "cls.predictions.decoder."),
)


def own_torch_names(name: str) -> tuple[str, ...]:
    """Return our spelling of a Hugging Face, NVIDIA or Composer name.

    The result need not be an existing parameter.

    A fused tensor gives three names: rows of the query, then key, then value. The tied decoder
    keeps its name, a key of `TIED`.
    """
    name = _torch_spelling(name)
    return (
        tuple(name.replace("QKV", part) for part in _QKV)
        if ".attention.self.QKV." in name
        else (name,)
    )
