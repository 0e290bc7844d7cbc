"""Presets (YAML, package data), prompt sets, and the reader that makes typed settings of them."""
