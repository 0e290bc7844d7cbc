"""Measuring: acceptance, latency, prediction, the losslessness certificate, the report."""
