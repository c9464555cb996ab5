"""Judge MLPerf results of any submitter: check, compare, repeat, trace, report, plan."""
