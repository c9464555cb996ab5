"""The seal of a system's results: names of its files."""

FILES = ("SHA256SUMS", "SHA256SUMS.sig", "SHA256SUMS.minisig")
