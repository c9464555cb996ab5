"""Reports on finished runs: numbers from MLPerf logs of any submitter,
and the page that shows them.
"""
