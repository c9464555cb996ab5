"""Settings of the submission."""

from __future__ import annotations

from typing import Literal

from mlbert.config.section import Section, setting


class SubmissionConfig(Section):
    """Submitter, platform and division named in the MLPerf log."""

    submission_org: str = setting("MLPERF_SUBMISSION_ORG", "Submitter named in the MLPerf log.")
    submission_platform: str = setting(
        "MLPERF_SUBMISSION_PLATFORM", "Platform named in the MLPerf log."
    )
    submission_division: Literal["open", "closed"] = setting(
        "MLPERF_DIVISION", "Division named in the MLPerf log."
    )
