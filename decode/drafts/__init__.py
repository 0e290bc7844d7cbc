"""Kinds of draft. The contract is in contract.py; each other file is one kind."""
