"""``convert_dataset.py``: convert text to MDS data sets."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from mlbert.cli.published import Parser
from mlbert.data.formats.tokenizer import UNCASED_NAMES, load_tokenizer
from mlbert.data.prepare import streaming
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.shares import parse_share
from mlbert.host.command_line import exit_code
from mlbert.host.console import console_progress
from mlbert.host.errors import UserError
from mlbert.host.exit_statuses import SUCCEEDED
from mlbert.host.option_checks import check_at_most_one

PROGRAM = "convert_dataset.py"
OWN = "text"
PYTHON = "python-text"


def _parser() -> Parser:
    parser = Parser(PROGRAM, "Convert text to MDS data sets for streaming.")
    kinds = [*streaming.HUB_SETS, OWN, PYTHON]
    parser.add_argument(
        "--dataset",
        required=True,
        choices=kinds,
        help=f"the first {len(streaming.HUB_SETS)} are downloaded",
    )
    parser.add_argument("--data_subset", help="subset of a downloaded data set; default for c4: en")
    files = (
        "a .txt file (a blank line ends a text), "
        'a .jsonl or .json file (one text per line, as "text")'
    )
    files = f"{files} or a .parquet file (column text), also compressed (.gz, .zst)"
    parser.add_argument(
        "--path", type=Path, help=f"for --dataset text: {files}, or a folder of such files"
    )
    parser.add_argument(
        "--splits",
        nargs="+",
        default=["train", "train_small", "val"],
        choices=list(streaming.SPLITS),
    )
    parser.add_argument(
        "--out_root", type=Path, required=True, help="parent of one folder per split"
    )
    parser.add_argument("--compression", help="zstd, or zstd:LEVEL")
    parser.add_argument(
        "--concat_tokens", type=int, help="tokenize, join, and cut into samples of this many tokens"
    )
    parser.add_argument(
        "--whole_texts",
        action="store_true",
        help="tokenize, and store the ids of each text as ModernBERT's pre-training reads them",
    )
    parser.add_argument(
        "--tokenizer", help="a vocab.txt or tokenizer.json, its folder, or a model's name"
    )
    parser.add_argument(
        "--bos_text", default="", help="with --concat_tokens: text before each text"
    )
    parser.add_argument("--eos_text", default="", help="with --concat_tokens: text after each text")
    parser.add_argument(
        "--no_wrap", action="store_true", help="with --concat_tokens: a new text for each sample"
    )
    parser.add_argument(
        "--workers", type=int, default=0, help="for --dataset text: processes; 0: one per core"
    )
    parser.add_argument(
        "--task", metavar="I/N", help="for --dataset text: make share I (0 to N-1) only"
    )
    parser.add_argument(
        "--merge", action="store_true", help="complete what the shares of --task made"
    )
    return parser


def main() -> None:
    """Run with this process's arguments, then exit."""
    sys.exit(exit_code(_run))


def _run() -> int:
    given = _parser().parse_args()
    share = parse_share(given.task, given.merge)
    form = _form(given)
    _check_source(given)
    tokenizer = load_tokenizer(given.tokenizer or UNCASED_NAMES[0])
    options: dict[str, Any] = {"tokenizer": tokenizer, "form": form}
    executor = Executor(given.workers or os.cpu_count() or 1, console_progress(), share)
    options |= {"compression": given.compression, "executor": executor}
    # Without a complete split, not all files are read.
    if given.dataset == OWN and not (
        share.is_all and all(streaming.SPLITS[split][1] for split in given.splits)
    ):
        streaming.convert_files(given.path, given.splits, given.out_root, **options)
        return SUCCEEDED
    if given.dataset in streaming.HUB_SETS:
        texts = streaming.hub_texts(given.dataset, given.data_subset)
    else:
        texts = (
            streaming.own_texts(given.path) if given.dataset == OWN else streaming.python_texts()
        )
    streaming.convert(texts, given.splits, given.out_root, **options)
    return SUCCEEDED


def _check_source(given: argparse.Namespace) -> None:
    remedy = f"Use --dataset {OWN} --path FILES"
    if given.dataset == OWN and given.path is None:
        raise UserError("config.missing", "--path", "is missing", remedy)
    for flag, is_given in {
        "--path": given.path,
        "--task": given.task,
        "--merge": given.merge,
    }.items():
        if given.dataset != OWN and is_given:
            raise UserError(
                "config.conflict", flag, f"conflicts with --dataset {given.dataset}", remedy
            )
    if given.dataset not in streaming.HUB_SETS and given.data_subset is not None:
        raise UserError(
            "config.conflict",
            "--data_subset",
            f"conflicts with --dataset {given.dataset}",
            "Leave it out",
        )


def _form(given: argparse.Namespace) -> streaming.Form:
    check_at_most_one(
        {"--whole_texts": given.whole_texts or None, "--concat_tokens": given.concat_tokens}
    )
    form = streaming.WholeTexts() if given.whole_texts else _concatenation(given)
    if form is not None and given.dataset in streaming.HUB_SETS and given.tokenizer is None:
        flag = "--whole_texts" if given.whole_texts else "--concat_tokens"
        remedy = f"Give --tokenizer {UNCASED_NAMES[0]}"
        raise UserError("config.missing", flag, "needs a tokenizer", remedy)
    return form


def _concatenation(given: argparse.Namespace) -> streaming.Concatenation | None:
    if given.concat_tokens is None:
        if given.bos_text or given.eos_text or given.no_wrap:
            remedy = "Give --concat_tokens"
            raise UserError(
                "config.conflict",
                "--bos_text, --eos_text and --no_wrap",
                "have no effect alone",
                remedy,
            )
        return None
    if given.concat_tokens < 1:
        reason = f"{given.concat_tokens} is not a number of tokens"
        raise UserError("config.range", "--concat_tokens", reason, "Use 1 or more")
    return streaming.Concatenation(
        given.concat_tokens, given.bos_text, given.eos_text, not given.no_wrap
    )
