"""``convert_dataset.py``: convert text to MDS data sets."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mlbert.cli.main import exit_code
from mlbert.cli.published import Parser
from mlbert.data.formats.tokenizer import UNCASED_NAMES, load_tokenizer
from mlbert.data.prepare.streaming import (
    HUB_SETS,
    SPLITS,
    Concatenation,
    Texts,
    check_absent,
    convert,
    hub_texts,
    own_texts,
    python_texts,
)
from mlbert.distributed.lifecycle import SUCCEEDED
from mlbert.host.errors import UserError
from mlbert.programs.console import console_progress

PROGRAM = "convert_dataset.py"
OWN, PYTHON = "text", "python-text"


def _parser() -> Parser:
    parser = Parser(PROGRAM, "Convert text to MDS data sets for streaming.")
    kinds = [*HUB_SETS, OWN, PYTHON]
    parser.add_argument("--dataset", required=True, choices=kinds, help=f"the first {len(HUB_SETS)} are downloaded")
    parser.add_argument("--data_subset", help="subset of a downloaded data set; default for c4: en")
    files = 'a .txt file (a blank line ends a text), a .jsonl or .json file (one text per line, as "text")'
    files = f"{files}, also compressed (.gz, .zst)"
    parser.add_argument("--path", type=Path, help=f"for --dataset text: {files}, or a folder of such files")
    parser.add_argument("--splits", nargs="+", default=["train", "train_small", "val"], choices=list(SPLITS))
    parser.add_argument("--out_root", type=Path, required=True, help="parent of one folder per split")
    parser.add_argument("--compression", help="zstd, or zstd:LEVEL")
    parser.add_argument(
        "--concat_tokens", type=int, help="tokenise, concatenate, and cut into samples of this many tokens"
    )
    parser.add_argument("--tokenizer", help="a vocab.txt, its folder, or a model's name")
    parser.add_argument("--bos_text", default="", help="with --concat_tokens: text before each text")
    parser.add_argument("--eos_text", default="", help="with --concat_tokens: text after each text")
    parser.add_argument(
        "--no_wrap", action="store_true", help="with --concat_tokens: start each sample with a new text"
    )
    return parser


def main() -> None:
    """Run with this process's arguments, then exit."""
    sys.exit(exit_code(_run))


def _run() -> int:
    given = _parser().parse_args()
    check_absent(given.splits, given.out_root)
    concatenation = _concatenation(given)
    tokenizer = load_tokenizer(given.tokenizer or UNCASED_NAMES[0])
    convert(
        _texts(given),
        given.splits,
        given.out_root,
        tokenizer=tokenizer,
        concatenation=concatenation,
        compression=given.compression,
        progress=console_progress(),
    )
    return SUCCEEDED


def _texts(given: argparse.Namespace) -> Texts:
    if (given.dataset == OWN) != (given.path is not None):
        remedy = f"Use --dataset {OWN} --path FILES"
        if given.path is None:
            raise UserError("config.missing", "--path", "is missing", remedy)
        raise UserError("config.conflict", "--path", f"conflicts with --dataset {given.dataset}", remedy)
    if given.dataset in HUB_SETS:
        return hub_texts(given.dataset, given.data_subset)
    if given.data_subset is not None:
        raise UserError("config.conflict", "--data_subset", f"conflicts with --dataset {given.dataset}", "Leave it out")
    return own_texts(given.path) if given.dataset == OWN else python_texts()


def _concatenation(given: argparse.Namespace) -> Concatenation | None:
    if given.concat_tokens is None:
        if given.bos_text or given.eos_text or given.no_wrap:
            remedy = "Give --concat_tokens"
            raise UserError("config.conflict", "--bos_text, --eos_text and --no_wrap", "have no effect alone", remedy)
        return None
    if given.concat_tokens < 1:
        reason = f"{given.concat_tokens} is not a number of tokens"
        raise UserError("config.range", "--concat_tokens", reason, "Use 1 or more")
    if given.dataset in HUB_SETS and given.tokenizer is None:
        reason = "needs a tokenizer"
        raise UserError("config.missing", "--concat_tokens", reason, f"Give --tokenizer {UNCASED_NAMES[0]}")
    return Concatenation(given.concat_tokens, given.bos_text, given.eos_text, not given.no_wrap)
