"""Conversion of manual pages to plain text."""

from installed_text import manual_text
from mlbert.data.prepare.prose import prose_sentences

PAGE = r""".\" A comment that is not printed.
.TH LS 1 "March 2026"
.SH NAME
ls \- list directory contents
.SH DESCRIPTION
List information about the
.B FILEs
in the \fIcurrent\fR directory by default. Sort entries alphabetically if none of
.BR \-cftuvSUX
is given.
.PP
Mandatory arguments to long options are mandatory for short ones too.
"""


def test_manual_page_becomes_sentences() -> None:
    assert prose_sentences(manual_text(PAGE)) == [
        "ls - list directory contents",
        "List information about the FILEs in the current directory by default.",
        "Sort entries alphabetically if none of -cftuvSUX is given.",
        "Mandatory arguments to long options are mandatory for short ones too.",
    ]
