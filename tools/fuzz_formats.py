"""The formats that the project reads, each with commands for `tools/fuzz.py`.

A command is the arguments of ``mlbert``, with {in} for the input folder and {out} for a new folder.
"""

from __future__ import annotations

import fuzz_inputs as inputs

_TO_HDF5 = (
    "prepare tfrecord-to-hdf5 --input {in}/records --vocab {in}/data/vocab.txt --out {out}/x "
    "--workers 1"
)
_IMPORT = "prepare import --vocab {in}/vocab.txt --out {out}/x --workers 1"
_PRETRAIN = "max_seq_len=24 max_duration=1ba eval_interval=1ba save_folder={out}/run"
_TEXTS = "tokenizer_name={in}/texts/vocab.txt"
_WEIGHTS = "--init_checkpoint {in}/out/run_0/weights/model.safetensors"
_ALL = "--workers 1 --out {out}/x"
_SHORT = inputs.train_words(output_dir="{out}/run", max_steps=1)
_SHORT_PACKED = inputs.train_words(
    output_dir="{out}/run", max_steps=1, input_dir="{in}/packed", average_packing_rate=2
)
_INSTANCES = (
    "prepare instances --input {in}/text --vocab {in}/data/vocab.txt --out {out}/x --workers 1"
)
_PRETRAIN_YAML = (
    f"pretrain {{in}}/main.yaml data_local={{in}}/data tokenizer_name={{in}}/vocab.txt {_PRETRAIN}"
)
_ESTIMATE = (
    "prepare estimate --input {in}/text/part.txt --vocab {in}/data/vocab.txt --workers 1 "
    "--sample-mb 0.01"
)
FORMATS = {
    "log": inputs.Format(
        inputs.write_logs,
        ("logs/result_*.txt", "own/result_0.txt"),
        """report {in}/logs --html {out}/page.html
        report {in}/own --json
        report {in}/logs {in}/own
        submission trace {in}/own/result_0.txt
        submission diff {in}/logs {in}/own
        plan --calibrate {in}/own/result_0.txt --gpus 8""",
    ),
    "checked log": inputs.Format(
        inputs.write_logs,
        ("logs/result_*.txt", "own/result_0.txt"),
        """submission check {in}/logs
        submission check {in}/own/result_0.txt --json -""",
        quick=False,
    ),
    "run files": inputs.Format(
        inputs.write_run_folder,
        (
            "out/run_0/metrics.jsonl",
            "out/run_0/summary.json",
            "out/run_0/config.json",
            "out/data/baselines.json",
        ),
        """report {in}/out --html {out}/page.html
        report {in}/out
        report {in}/out --json""",
    ),
    "checked run files": inputs.Format(
        inputs.write_run_folder,
        ("out/run_0/*.json*",),
        """submission check {in}/out
        submission repeat {in}/out/result_0.txt --data {in}/data""",
        quick=False,
    ),
    "system": inputs.Format(
        inputs.write_submission_tree,
        ("tree/systems/*.json", "tree/results/*/bert/result_*.txt"),
        """report {in}/tree --html {out}/page.html
        submission diff {in}/tree/results/cpu_demo {in}/tree/results/cpu_demo/bert/result_1.txt""",
    ),
    "checked system": inputs.Format(
        inputs.write_submission_tree,
        ("tree/systems/*.json", "tree/results/*/SHA256SUMS", "tree/results/*/run_*"),
        "submission check {in}/tree",
        quick=False,
    ),
    "shape": inputs.Format(
        inputs.write_run_folder,
        ("bert_config.json", "out/run_0/weights/bert_config.json"),
        f"""plan --model {{in}}/bert_config.json --gpus 8 --samples 1e5
        {_SHORT}
        {_SHORT} --print-config
        convert torch-to-hf {{in}}/out/run_0/weights {{out}}/hf""",
    ),
    "checkpoint": inputs.Format(
        inputs.write_interrupted_run,
        (
            "out/run_0/checkpoints/*/*",
            "out/run_0/metrics.jsonl",
            "out/run_0/config.json",
            "out/result_0.txt",
        ),
        inputs.train_words(resume=1),
        quick=False,
    ),
    "weights": inputs.Format(
        inputs.write_hugging_face_model,
        ("hf/*", "out/run_0/weights/*", "nvidia.pt", "composer.pt"),
        f"""convert torch-to-hf {{in}}/out/run_0/weights {{out}}/hf
        convert hf-to-torch {{in}}/hf {{out}}/weights
        convert nvidia-to-torch {{in}}/nvidia.pt {{out}}/x --config {{in}}/bert_config.json
        convert composer-to-torch {{in}}/composer.pt {{out}}/x --config {{in}}/bert_config.json
        {_SHORT} {_WEIGHTS}
        {_SHORT} {_WEIGHTS} --evaluate-only""",
    ),
    "prepared set": inputs.Format(
        inputs.write_packed_set,
        ("data/train/*", "packed/*", "data/eval/*"),
        f"""prepare verify {{in}}/data/train --workers 1
        prepare verify {{in}}/packed --workers 1
        prepare pack --input {{in}}/data/train --out {{out}}/packed --workers 1
        prepare export-nvidia --input {{in}}/packed --out {{out}}/x --layout packed --workers 1
        prepare hdf5-to-tfrecord --input {{in}}/data/train --out {{out}}/x --workers 1
        prepare digest {{in}}/data/train
        {_SHORT}
        {_SHORT_PACKED}""",
    ),
    "mds": inputs.Format(
        inputs.write_mds_sets,
        ("plain/*", "zstd/*", "texts/data/*/*"),
        f"""prepare verify {{in}}/plain --workers 1
        prepare verify {{in}}/zstd --workers 1
        {_IMPORT} --input {{in}}/zstd
        {_IMPORT} --input {{in}}/plain
        pretrain {{in}}/texts/main.yaml data_local={{in}}/texts/data {_PRETRAIN} {_TEXTS}""",
    ),
    "tfrecord": inputs.Format(
        inputs.write_tfrecords,
        ("records/*",),
        f"""prepare verify {{in}}/records --workers 1
        prepare recognize {{in}}/records
        prepare digest {{in}}/records
        {_TO_HDF5}
        {_TO_HDF5} --skip-bad""",
    ),
    "hdf5": inputs.Format(
        inputs.write_hdf5_shards,
        ("*/part_00000.hdf5",),
        "\n".join(
            f"""prepare verify {{in}}/{layout} --workers 1
            {_IMPORT} --input {{in}}/{layout}
            prepare bins-hdf5 {{in}}/{layout} {{out}}/x --edges 16,40 --workers 1"""
            for layout in ("fixed", "variable", "packed")
        ),
    ),
    "text": inputs.Format(
        inputs.write_stored_set,
        ("text/part.txt", "data/vocab.txt"),
        f"""{inputs.MAKE_SET.replace("{in}/data", "{out}/data")}
        {_INSTANCES}
        prepare recognize {{in}}/text""",
    ),
    "vocabulary": inputs.Format(
        inputs.write_tfrecords,
        ("data/vocab.txt",),
        f"""{_TO_HDF5}
        {_INSTANCES}""",
    ),
    "tasks": inputs.Format(
        inputs.write_task,
        ("train.csv", "eval.jsonl", "task.yaml", "hf/vocab.txt", "hf/tokenizer*.json"),
        """finetune {in}/task.yaml save_folder={out}/run
        finetune {in}/task.yaml save_folder={out}/run load_path={in}/hf""",
        quick=False,
    ),
    "yaml": inputs.Format(
        inputs.write_yaml,
        ("*.yaml",),
        f"""train --config {{in}}/run.yaml --print-config
        plan --config {{in}}/run.yaml --gpus 8 --precision bf16 --samples 1e5
        {_PRETRAIN_YAML}""",
    ),
}
CAMPAIGN = FORMATS | {
    "other commands": inputs.Format(
        inputs.write_task,
        (
            "data/train/manifest.json",
            "data/vocab.txt",
            "text/part.txt",
            "hf/*",
            "task.yaml",
            "out/result_0.txt",
        ),
        f"""fill-mask {{in}}/hf river_holds_the_[MASK]
        export {{in}}/out --out {{out}}/x
        prepare shuffle --input {{in}}/data/train {_ALL}
        prepare bins --input {{in}}/data/train --edges 16,32 {_ALL}
        prepare eval-set --input {{in}}/data/train --num 8 --out {{out}}/x
        {_ESTIMATE}
        prepare clean --input {{in}}/text {_ALL}
        prepare glue --out {{out}}/x
        prepare download --manifest {{in}}/out/run_0/config.json --out {{out}}/x
        glue {{in}}/task.yaml data.glue={{in}}/text
        mosaic {{in}}/task.yaml max_duration=1ba
        submission seal {{in}}/out
        submission export {{out}}/x --tree {{in}}
        submission new-system x1_n1 --tree {{in}}
        launch abort-log {{in}}/out/result_0.txt --reason test
        launch test-network --sizes 1
        bench step --config {{in}}/bert_config.json""",
    ),
    "pretrain": inputs.Format(
        inputs.write_stored_set,
        ("text/part.txt", "data/vocab.txt"),
        "pretrain {in}/text --out {out}/x --minutes 0.05 --size tiny --vocab {in}/data/vocab.txt",
    ),
}
